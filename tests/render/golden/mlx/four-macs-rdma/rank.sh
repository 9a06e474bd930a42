#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 4 ranks on 4 nodes x 1 M3-Ultra.
# micro-batch 16 x 1 accumulation step x 4 data ranks = 64 samples a step.
# One rank, started by mlx.launch on its Mac: says how it ended.
set -euo pipefail
# These slow a run down or end it, where a shell or a cluster profile sets them:
unset MLX_METAL_FAST_SYNCH  # 1 can deadlock the GPU (mlx issue 3142); off is the default
python="$1"
"$python" mlx_check.py mac --memory-bytes 1119918423 --rdma
# The highest tiers of throughput and latency (taskpolicy(8)): macOS keeps a process of lower
# quality of service on the efficiency cores, and one slow rank holds up all.
start() {
  if [[ "$(uname)" == Darwin ]]; then exec taskpolicy -t 0 -l 0 "$@"; fi
  exec "$@"
}
start "$@" &
program=$!
trap 'kill "$program"' TERM INT HUP
code=0
wait "$program" || code=$?
# mpirun numbers its ranks itself.
rank="${MLX_RANK:-${OMPI_COMM_WORLD_RANK:-}}"
printf '\nrank %s ended with %s\n' "$rank" "$code"
exit "$code"
