#!/bin/bash
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2 --master-port=29500 train.py &
CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node=2 --master-port=29501 train.py &
wait
for seed in 1 2 3; do
  torchrun --standalone --nproc-per-node=4 train.py --seed $seed
done
for i in 0 1; do
  CUDA_VISIBLE_DEVICES=$i torchrun --nproc-per-node=1 --master-port=$((29600 + i)) train.py &
done
wait
