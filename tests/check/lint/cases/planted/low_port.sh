torchrun --nproc-per-node=8 --master-port 80 train.py  #! port-in-use
