#!/bin/sh
export NCCL_SOCKET_IFNAME=lo
export GLOO_SOCKET_IFNAME=lo
export NCCL_LIBS=/usr/lib
torchrun --standalone --nproc-per-node=8 train.py
