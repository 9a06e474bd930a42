#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
srun bash setup.sh
if [ "$SLURM_NODEID" = "0" ]; then
  export NCCL_ALGO=Ring  #! nccl-size-mismatch
fi
srun python train.py
