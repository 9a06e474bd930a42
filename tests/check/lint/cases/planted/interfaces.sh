#? {"nodes": 2}
export NCCL_SOCKET_IFNAME=docker0  #! nccl-wrong-interface
export GLOO_SOCKET_IFNAME=lo
export NCCL_GRAPH_FILE=/opt/graph.xml  #! nccl-graph-file-env
export NCCL_ASYNC_ERROR_HANDLING=1  #! nccl-env-deprecated
export NCCL_SOCKET_IFNAMES=eth0  #! nccl-env-deprecated
export NCCL_IB_HCA=mlx5_0,mlx5_1
export NCCL_IB_DISABLE=1  #! ethernet-fallback
export NCCL_NET_GDR_LEVEL=LOC  #! gdr-peermem-missing
export NCCL_IB_TIMEOUT=14  #! ib-wc-retry-exceeded
export PYTORCH_CUDA_ALLOC_CONF=expandable_segment:True
export LD_PRELOAD=/usr/lib/libnccl.so.2  #! nccl-version-mismatch
export TOKENIZERS_PARALLELISM=true
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 train.py
