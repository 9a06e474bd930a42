# shellcheck shell=bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 4 ranks on 2 nodes x 2 cpu ranks.
# micro-batch 16 x 1 accumulation step x 4 data ranks = 64 samples a step.
# gloo sends over TCP
#
# Use it with: . ./network.sh
export OMP_NUM_THREADS=1  # set it to (cores of a node) / (ranks on it): the job file does not give the cores
