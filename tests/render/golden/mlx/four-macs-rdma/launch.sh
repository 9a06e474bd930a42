#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 4 ranks on 4 nodes x 1 M3-Ultra.
# micro-batch 16 x 1 accumulation step x 4 data ranks = 64 samples a step.
# Memory of each rank (estimated): 1.04 GiB of 512 GiB:
#   parameters 12.8 MiB, gradients 25.5 MiB, optimizer 25.5 MiB, activations 86.6 MiB, gathered 6.13 MiB, slack 5.56 MiB, overhead 906 MiB.
# RDMA over Thunderbolt: macOS 26.2 or newer, a Thunderbolt 5 cable between every two of the 4 Macs, and
# `rdma_ctl enable` once on each in macOS Recovery.
# Run it on one machine that reaches every Mac by ssh. This folder is at the
# same path on all of them.
set -euo pipefail
cd "$(dirname "$0")"
train="${TRAIN_SCRIPT:-train.py}"
python="${PYTHON:-$(mlx.launch --print-python)}"
hostfile="${HOSTFILE:-hosts.json}"
"$python" mlx_check.py hosts "$hostfile" --ranks 4 --backend jaccl --reach "$python"
kept="$(mktemp -d)"
trap 'rm -rf "$kept"' EXIT
# mlx.launch reads its input all the time, and spins where that has ended.
mkfifo "$kept/input"
exec 3<>"$kept/input"
mlx.launch --hostfile "$hostfile" --backend jaccl --starting-port "${STARTING_PORT:-32323}" --cwd "$PWD" -- \
  bash rank.sh "$python" "$train" "$@" <&3 | tee "$kept/output"
# mlx.launch ends with 0 even when ranks die: what they said counts.
"$python" mlx_check.py run "$kept/output" --ranks 4
