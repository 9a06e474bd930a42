#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3
python finetune.py --deepspeed ds_zero3.json --bf16 True  #! launcher-plain-python
