# shellcheck shell=bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# TCP of the faster kinds costs less than is noticed: infiniband-ndr, 400 Gb/s a node, 35.5 ms a step; over TCP, by one port a node: ethernet-100 1 times as long, ethernet-25 1.1 times as long, ethernet-10 1.4 times as long; the most it sends at once is 3.19 MiB (estimated)
#
# Use it with: . ./network.sh
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
# export NCCL_SOCKET_IFNAME==eth0  # only where `NET/Socket : Using` in the log names an interface that other nodes cannot reach; = is exactly this one
# export NCCL_IB_HCA==mlx5_0,mlx5_1  # only where some ports are for storage; without = mlx5_1 is mlx5_10 as well
