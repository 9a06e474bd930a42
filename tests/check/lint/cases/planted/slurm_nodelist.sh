#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:v100:4
export MASTER_ADDR=$SLURM_JOB_NODELIST  #! dns-unresolvable-master
export MASTER_PORT=29500
srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=4 --master-addr=$MASTER_ADDR train.py \
  --bf16'  #! bf16-unsupported-gpu
