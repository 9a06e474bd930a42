#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --signal=SIGUSR1@90
srun python fit.py --trainer.devices=8 --trainer.num_nodes=2  #! slurm-ntasks-mismatch
