#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# Expected: $0.03 in 0.000972 h, 1 x gpu_8x_h100_sxm5 on demand (price of 2026-11-21 or earlier; skypilot-org/skypilot-catalog@0f4070387edc953d7004cff197940e1918a1d6aa catalogs/v8/lambda/vms.csv).
# Ends after 30m 05s at the latest, or 10m 00s of idleness. That is $16.01 at the most, at $31.92 an hour.
set -euo pipefail
cd "$(dirname "$0")"
: "${LAMBDA_API_KEY:?set it in your environment}"
: "${LAMBDA_SSH_KEY_NAME:?set it in your environment}"
: "${HF_TOKEN:?set it in your environment}"
exec python3 lambda_submit.py "$@"
