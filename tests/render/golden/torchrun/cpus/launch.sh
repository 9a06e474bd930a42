#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 4 ranks on 2 nodes x 2 cpu ranks.
# micro-batch 16 x 1 accumulation step x 4 data ranks = 64 samples a step.
#
# After a failure torchrun restarts all ranks, 3 times at most, from
# the newest whole checkpoint (a script of your own loads its own). This file
# resumes there too when you run it again.
# Run this on every node, in a folder that all of them see: checkpoints/ is written there.
# The first node keeps the rendezvous: the job ends with it.
# It starts with 1 to 2 nodes, 30 s after 1 came. One that comes or goes
# restarts all ranks, which is not counted. The batch is the same on any of them: fewer
# ranks do more micro-batches. Your own TRAIN_SCRIPT must do that as well.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1  # set it to (cores of a node) / (ranks on it): the job file does not give the cores
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a restart uses a new store: the old one has addresses of ranks that ended
: "${HEAD_ADDRESS:?set it to the address of the first node, the same on every node}"
: "${HEAD_PORT:=29500}"
: "${RUN_ID:?set it to one name for the run, the same on every node}"
exec torchrun \
  --nnodes=1:2 \
  --nproc-per-node=2 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT" \
  --rdzv-id="$RUN_ID" \
  --max-restarts=3 \
  "${TRAIN_SCRIPT:-train.py}" "$@"
