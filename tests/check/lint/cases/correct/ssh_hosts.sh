#!/usr/bin/env bash
HOSTS=(node0 node1)
for i in "${!HOSTS[@]}"; do
  ssh "${HOSTS[$i]}" "cd /work && torchrun --nnodes=2 --node-rank=$i --nproc-per-node=8 --master-addr=node0 --master-port=29500 train.py" &
done
wait
