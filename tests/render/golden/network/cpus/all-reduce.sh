#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 4 ranks on 2 nodes x 2 cpu ranks.
# micro-batch 16 x 1 accumulation step x 4 data ranks = 64 samples a step.
# All-reduce from 1 KiB to 256 MiB over all ranks; run it on every node.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=network.sh
. ./network.sh
found=all_reduce.json
: "${HEAD_ADDRESS:?set it to the address of the first node, the same on every node}"
: "${HEAD_PORT:=29500}"
: "${RUN_ID:?set it to one name for the run, the same on every node}"
torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT" --rdzv-id="$RUN_ID" all_reduce.py --json "$found" "$@"
