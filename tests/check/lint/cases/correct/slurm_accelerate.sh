#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
export HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export GPUS=8
srun bash -c 'accelerate launch --num_processes $((SLURM_NNODES * GPUS)) --num_machines $SLURM_NNODES \
  --machine_rank $SLURM_NODEID --main_process_ip $HEAD --main_process_port 29500 \
  --mixed_precision bf16 train.py --workers 4'
