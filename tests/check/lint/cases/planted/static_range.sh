torchrun --nnodes=1:4 --nproc-per-node=8 --master-addr=node0 --master-port=29500 train.py  #! rendezvous-c10d-timeout
