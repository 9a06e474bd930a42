#!/bin/bash
set -u
port=29510
for spec in "0,1,2,3:base" "4,5,6,7:wide"; do
  CUDA_VISIBLE_DEVICES=${spec%%:*} torchrun --nproc_per_node=4 --master_port=$port \
    train.py --name "${spec##*:}" &
  port=$((port + 1))
done
wait
