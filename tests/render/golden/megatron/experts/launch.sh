#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# data 8 x tensor 2 x pipeline 2 (interleaved, 8 virtual stages), ZeRO-1, expert 8 on 4 nodes x 8 H100-SXM.
# micro-batch 2 x 4 accumulation steps x 8 data ranks = 64 samples a step.
# Needs MEGATRON_PATH, a checkout of NVIDIA/Megatron-LM at core_v0.16.1, and the same folder
# on every node: checkpoints/ is written here.
# After a failure torchrun restarts all ranks, 3 times at most, from
# the newest whole checkpoint. This file
# resumes there too when you run it again.
set -euo pipefail
: "${MEGATRON_PATH:?set it to a checkout of Megatron-LM, core_v0.16.1}"
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1  # set it to (cores of a node) / (ranks on it): the job file does not give the cores
export TORCH_NCCL_DUMP_ON_TIMEOUT=1  # at a time-out every rank dumps its last collectives, for torchfrtrace
export TORCH_FR_BUFFER_SIZE=2000  # how many collectives a rank keeps for that
export PYTORCH_ALLOC_CONF=expandable_segments:True  # less fragmentation where blocks of many sizes are gathered (torch 2.9 and newer)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a restart uses a new store: the old one has addresses of ranks that ended
# These slow a run down or end it, where a shell or a cluster profile sets them:
unset NCCL_ALGO  # a debugging setting: NCCL chooses by message size, and since 2.24 a misspelled value ends the run
unset NCCL_PROTO  # a debugging setting: LL128 corrupts data on hardware that lacks it
unset NCCL_NTHREADS  # only 64, 128, 256 and 512 are valid; unset, NCCL chooses by the GPU
unset NCCL_BUFFSIZE  # the default is 4 MiB; 8 MiB takes twice the memory on every channel
unset NCCL_MIN_NCHANNELS  # replaced by NCCL_MIN_CTAS in 2.17; more channels take multiprocessors from compute
unset NCCL_P2P_LEVEL  # a number is the old syntax (5 = SYS, across sockets); unset, NCCL chooses by the topology
unset NCCL_P2P_DISABLE  # 1 sends between GPUs of a node through the host's memory
unset NCCL_SHM_DISABLE  # 1 sends between GPUs of a node over the network where they lack P2P
unset NCCL_NET_GDR_LEVEL  # a number is the old syntax (5 = SYS, which can be slower); unset, NCCL chooses
unset NCCL_IB_GDR_LEVEL  # the name of NCCL_NET_GDR_LEVEL before 2.4
unset TORCH_NCCL_BLOCKING_WAIT  # 1 blocks the host at every collective, so nothing overlaps
unset TORCH_NCCL_ASYNC_ERROR_HANDLING  # 3 is the default; with 1 the flight recorder cannot dump, with 0 a hang never ends
unset NCCL_ASYNC_ERROR_HANDLING  # the name of TORCH_NCCL_ASYNC_ERROR_HANDLING before torch 2.2
unset NCCL_IB_DISABLE  # 0 is the default, and 1 falls back to TCP on a network that has RDMA
unset NCCL_NET_GDR_READ  # NCCL sets it by the topology: 0 copies what is sent through the host
export CUDA_DEVICE_MAX_CONNECTIONS=1  # before Blackwell communication is launched before the product that would fill the GPU
: "${HEAD_ADDRESS:?set it to the address of the first node, the same on every node}"
: "${HEAD_PORT:=29500}"
: "${RUN_ID:?set it to one name for the run, the same on every node}"
arguments=()
while read -r -a words; do arguments+=("${words[@]}"); done \
  < <(grep -v '^#' arguments.txt)
data=()
if [ -n "${DATA_PATH:-}" ]; then data=(--data-path "$DATA_PATH" --split "99,1,0"); fi
if [ -n "${MOCK_DATA:-}" ]; then data=(--mock-data); fi
if [ "${#data[@]}" -eq 0 ]; then
  echo "set DATA_PATH to the prefix of token files, or MOCK_DATA=1 to try without" >&2
  exit 2
fi
exec torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT" --rdzv-id="$RUN_ID" \
  --max-restarts=3 \
  "$MEGATRON_PATH/pretrain_gpt.py" "${arguments[@]}" "${data[@]}" "$@"
