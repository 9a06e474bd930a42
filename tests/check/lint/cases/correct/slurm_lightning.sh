#!/bin/bash
#? {"launcher": "lightning", "devices": 4, "num_nodes": 2}
#SBATCH -N 2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=10:00:00
#SBATCH --signal=SIGUSR1@90
export OMP_NUM_THREADS=8
srun python train.py --devices 4 --num_nodes 2 --num_workers 6
