#!/bin/bash
nohup torchrun --standalone --nproc-per-node=8 train.py > log.txt 2>&1 &  #! sighup-terminal-closed
