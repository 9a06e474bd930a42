#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
ARGS=(
  --tensor-model-parallel-size 16  #! tp-across-nodes
  --pipeline-model-parallel-size 2
  --num-layers 32 --num-attention-heads 32
  --micro-batch-size 1 --global-batch-size 64
)
torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $H:29500 pretrain_gpt.py "${ARGS[@]}"
