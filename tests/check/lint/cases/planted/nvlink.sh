#? {"gpu": "H100-SXM"}
export NCCL_P2P_DISABLE=1  #! acs-p2p-hang
torchrun --standalone --nproc-per-node=8 train.py
