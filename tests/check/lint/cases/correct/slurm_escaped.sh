#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
MASTER=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --node_rank \$SLURM_NODEID --master_addr $MASTER --master_port 29501 train.py"
