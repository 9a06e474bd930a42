#!/usr/bin/env bash
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py --lr 1e-3 &
CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 train.py --lr 1e-4 &  #! port-in-use
wait
