#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# Rents what task.yaml says and starts the run on it.
set -euo pipefail
cd "$(dirname "$0")"
: "${HF_TOKEN:?set it in your environment}"
exec sky launch -c "${CLUSTER:-tiny}" --secret HF_TOKEN "$@" task.yaml
