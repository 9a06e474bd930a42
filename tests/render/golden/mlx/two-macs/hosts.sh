#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 2 ranks on 2 nodes x 1 M3-Ultra.
# micro-batch 32 x 1 accumulation step x 2 data ranks = 64 samples a step.
# Writes hosts.json: asks every Mac for its cables and addresses.
set -euo pipefail
cd "$(dirname "$0")"
: "${MACS:?set it to the names of the Macs for ssh, with commas, rank 0 first}"
exec mlx.distributed_config --hosts "$MACS" --over thunderbolt --backend ring --output-hostfile hosts.json "$@"
