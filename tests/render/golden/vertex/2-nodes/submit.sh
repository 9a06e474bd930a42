#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# Copies this folder into the bucket and submits the job.
set -euo pipefail
cd "$(dirname "$0")"
: "${GOOGLE_CLOUD_PROJECT:?set it in your environment}"
gcloud storage rsync --recursive '--exclude=^\.env|^checkpoints/|^spent-seconds' . gs://bucket/runs/tiny
exec gcloud ai custom-jobs create --region=us-central1 --display-name=tiny --config=job.yaml --project="$GOOGLE_CLOUD_PROJECT" "$@"
