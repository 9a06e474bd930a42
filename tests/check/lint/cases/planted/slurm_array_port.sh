#!/bin/bash
#SBATCH --array=0-7
#SBATCH --gpus=2
export MASTER_PORT=29511  #! port-in-use
torchrun --nproc-per-node=2 --master-port=$MASTER_PORT train.py --seed $SLURM_ARRAY_TASK_ID
