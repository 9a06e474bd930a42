#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 4 ranks on 4 nodes x 1 M3-Ultra.
# micro-batch 16 x 1 accumulation step x 4 data ranks = 64 samples a step.
# Writes hosts.json: asks every Mac for its cables and addresses.
set -euo pipefail
cd "$(dirname "$0")"
: "${MACS:?set it to the names of the Macs for ssh, with commas, rank 0 first}"
exec mlx.distributed_config --hosts "$MACS" --over thunderbolt --backend jaccl --output-hostfile hosts.json "$@"
