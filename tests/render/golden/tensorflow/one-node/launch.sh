#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# MirroredStrategy over the GPUs of this machine.
set -euo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
train="${TRAIN_SCRIPT:-train.py}"
exec "$python" "$train" "$@"
