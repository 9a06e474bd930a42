#!/bin/bash
#SBATCH --time=00:30:00
#SBATCH --gres=gpu:4
torchrun --nnodes=1:2 --nproc_per_node=4 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=localhost:6000 train.py
