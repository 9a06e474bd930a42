export MASTER_ADDR="[fd00::12]"  #! ipv6-bracket-master-addr
export MASTER_PORT=29500
torchrun --nnodes=2 --node-rank=$RANK --nproc-per-node=8 --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py  #! ipv6-bracket-master-addr
