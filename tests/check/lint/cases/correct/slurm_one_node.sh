#!/bin/bash
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH --mem=256G
#SBATCH --time=08:00:00
#SBATCH --requeue
export OMP_NUM_THREADS=8
torchrun --standalone --nproc-per-node=4 train.py --num-workers 7
