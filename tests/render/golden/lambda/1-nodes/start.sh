#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# What the instance runs; lambda_submit.py ends the instance after.
set -euo pipefail
cd "$(dirname "$0")"
python3 cloud_guard.py --max-run-s 1805 --idle-s 600 --per-hour-usd 31.9200 --budget-usd 100 -- bash launch.sh
