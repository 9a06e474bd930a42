#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $H:29500 pretrain_gpt.py \
  --tensor-model-parallel-size 2 \
  --pipeline-model-parallel-size 8 \ #! pipeline-bubble
  --num-layers 32 --num-attention-heads 33 \
  --micro-batch-size 1 --global-batch-size 8
