#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
srun --container-image=nvcr.io/nvidia/nemo:25.09 --container-mounts=/data:/data bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  python pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 \
    --num-layers 32 --num-attention-heads 32 --micro-batch-size 1 --global-batch-size 64 --sequence-parallel'
