#!/bin/bash
ulimit -l unlimited
ulimit -n 1024  #! too-many-open-files
torchrun --standalone --nproc-per-node=8 train.py
docker run --gpus all --ipc=host \
  --ulimit memlock=-1 \
  --ulimit nofile=512:512 image torchrun --standalone --nproc-per-node=8 train.py  #! too-many-open-files
