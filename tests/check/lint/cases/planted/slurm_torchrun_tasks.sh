#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8  #! slurm-ntasks-mismatch
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=12:00:00
export OMP_NUM_THREADS=8
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d \
  --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID pretrain.py
