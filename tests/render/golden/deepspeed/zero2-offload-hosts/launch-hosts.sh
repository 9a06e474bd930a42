#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# ZeRO-2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# Run on one host: starts all of `hostfile` over ssh (pdsh), with `.deepspeed_env`.
set -euo pipefail
cd "$(dirname "$0")"
exec deepspeed --hostfile=hostfile --no_local_rank --master_addr=node-a --master_port="${HEAD_PORT:-29500}" "${TRAIN_SCRIPT:-train.py}" "$@"
