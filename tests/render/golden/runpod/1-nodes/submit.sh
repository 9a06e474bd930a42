#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# Expected: $0.03 in 0.000972 h, 1 x 8x H100-SXM on demand (price of 2026-11-21 or earlier; skypilot-org/skypilot-catalog@01acdfd419ce5afae1289ff14825b893ced0c196 catalogs/v8/runpod/vms.csv).
# Ends after 30m 05s at the latest, or 10m 00s of idleness. That is $13.20 at the most, at $26.32 an hour.
set -euo pipefail
cd "$(dirname "$0")"
: "${RUNPOD_API_KEY:?set it in your environment}"
: "${HF_TOKEN:?set it in your environment}"
exec python3 runpod_submit.py "$@"
