#!/bin/bash
python -m torch.distributed.launch $DISTRIBUTED_ARGS \
    pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24
