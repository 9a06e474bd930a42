#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun sh -c 'torchrun --master-addr '$master' --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --nproc-per-node gpu main.py'
