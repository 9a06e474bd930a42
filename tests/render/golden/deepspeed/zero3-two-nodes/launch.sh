#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# torchrun starts DeepSpeed's ranks as well as its own launcher does, and needs no ssh.
# For deepspeed 0.16.0 to 0.19.8.
set -euo pipefail
cd "$(dirname "$0")"
: "${HEAD_ADDRESS:?set it to the address of the first node, the same on every node}"
: "${HEAD_PORT:=29500}"
: "${RUN_ID:?set it to one name for the run, the same on every node}"
export OMP_NUM_THREADS=1  # set it to (cores of a node) / (ranks on it): the job file does not give the cores
export TORCH_NCCL_DUMP_ON_TIMEOUT=1  # at a time-out every rank dumps its last collectives, for torchfrtrace
export TORCH_FR_BUFFER_SIZE=2000  # how many collectives a rank keeps for that
export PYTORCH_ALLOC_CONF=expandable_segments:True  # less fragmentation where blocks of many sizes are gathered (torch 2.9 and newer)
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
exec torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT" --rdzv-id="$RUN_ID" "${TRAIN_SCRIPT:-train.py}" "$@"
