#!/bin/bash
export CUDA_VISIBLE_DEVICES=0
export WANDB_MODE=offline
python train.py --config configs/base.yaml --model models/llama
python -m torch.distributed.run --standalone --nproc_per_node=1 eval.py
echo "torchrun --nnodes=2 --rdzv-endpoint=localhost:1 is how not to do it"
