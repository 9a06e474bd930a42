#? {"gpu": "A100"}
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --sequence-parallel  #! cuda-device-max-connections
