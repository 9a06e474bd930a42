#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --mem=200G
export OMP_NUM_THREADS=16  #! omp-threads-default
srun python train.py --num_workers 8  #! dataloader-starved
