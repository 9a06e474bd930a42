#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# All-reduce from 1 KiB to 256 MiB over all ranks; run it on every node.
# With --tcp over TCP, into all_reduce-tcp.json; compare the two with
#   paceline bench --compare all_reduce.json all_reduce-tcp.json
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=network.sh
. ./network.sh
mkdir -p nccl-logs
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE=nccl-logs/%h-%p.log
found=all_reduce.json
if [[ "${1:-}" == --tcp ]]; then
  shift
  found=all_reduce-tcp.json
  # paceline: ignore[ethernet-fallback] TCP is what --tcp asks for
  export NCCL_NET=Socket
fi
: "${HEAD_ADDRESS:?set it to the address of the first node, the same on every node}"
: "${HEAD_PORT:=29500}"
: "${RUN_ID:?set it to one name for the run, the same on every node}"
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT" --rdzv-id="$RUN_ID" all_reduce.py --json "$found" "$@"
[[ "$found" == *-tcp.json ]] || ./check-network.sh nccl-logs/*.log
