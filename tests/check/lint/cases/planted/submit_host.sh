#!/bin/bash
#SBATCH -N 2
#SBATCH --gpus-per-node=8
srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$SLURM_SUBMIT_HOST:29500 train.py  #! rendezvous-c10d-timeout
