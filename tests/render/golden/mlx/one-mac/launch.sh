#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# 1 rank on 1 node x 1 M3-Ultra.
# micro-batch 64 x 1 accumulation step x 1 data rank = 64 samples a step.
# Memory of each rank (estimated): 1.31 GiB of 512 GiB:
#   parameters 12.8 MiB, gradients 25.5 MiB, optimizer 25.5 MiB, activations 346 MiB, gathered 6.13 MiB, slack 21.1 MiB, overhead 906 MiB.
set -euo pipefail
cd "$(dirname "$0")"
train="${TRAIN_SCRIPT:-train.py}"
python="${PYTHON:-python3}"
"$python" mlx_check.py mac --memory-bytes 1408558628
# The highest tiers of throughput and latency (taskpolicy(8)): macOS keeps a process of lower
# quality of service on the efficiency cores, and one slow rank holds up all.
start() {
  if [[ "$(uname)" == Darwin ]]; then exec taskpolicy -t 0 -l 0 "$@"; fi
  exec "$@"
}
start "$python" "$train" "$@"
