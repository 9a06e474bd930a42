#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# What the pod runs: whatever happens, it stops itself at the end.
set -euo pipefail
cd "$(dirname "$0")"
trap 'runpodctl stop pod "$RUNPOD_POD_ID"' EXIT
# runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04 has an older PyTorch.
python3 -m pip install --quiet 'torch>=2.11,<2.14' 'transformers>=5,<6'
python3 -c 'import sys,torch; torch.cuda.is_available() or sys.exit('"'"'PyTorch sees no GPU: its CUDA may need a newer driver. Set cloud.image'"'"')'
python3 cloud_guard.py --max-run-s 1805 --idle-s 600 --per-hour-usd 26.3200 --budget-usd 100 -- bash launch.sh
