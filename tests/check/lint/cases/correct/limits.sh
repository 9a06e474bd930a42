#!/bin/bash
ulimit -l unlimited
ulimit -n 65536
ulimit -c 0
torchrun --standalone --nproc-per-node=8 train.py
docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit nofile=65536:65536 image \
  torchrun --standalone --nproc-per-node=8 train.py
