#!/bin/sh
torchrun --nnodes 2 --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint node0:29500 \
  --rdzv-id $RANDOM \ #! rendezvous-timeout-few-nodes
  train.py
