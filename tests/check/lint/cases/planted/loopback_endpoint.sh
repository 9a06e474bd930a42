#!/bin/sh
# on every node
torchrun --nnodes=4 --nproc-per-node=8 --node-rank=$1 \
  --rdzv-backend=c10d --rdzv-id=run7 \
  --rdzv-endpoint=localhost:29400 train.py  #! rendezvous-c10d-timeout
