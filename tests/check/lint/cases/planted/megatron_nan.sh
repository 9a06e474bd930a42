export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --no-check-for-nan-in-loss-and-grad  #! nan-loss-undetected
