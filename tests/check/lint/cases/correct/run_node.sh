#!/bin/bash
# started by srun, once on every node
export NCCL_DEBUG=WARN
torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --node-rank="$SLURM_NODEID" \
  --master-addr="$HEAD" --master-port=29500 train.py
