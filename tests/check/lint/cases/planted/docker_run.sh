#!/bin/sh
docker run --rm --gpus all --network host -v $PWD:/w -w /w pytorch:2.6 \  #! shm-too-small
  torchrun --standalone --nproc-per-node=8 train.py
docker run --gpus all --ipc=host --device=/dev/infiniband -v /w:/w pytorch:2.6 \
  torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=n0 train.py
