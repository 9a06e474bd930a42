timeout 2d torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=5 --rdzv-backend=etcd-v2 \
  --rdzv-endpoint=etcd:2379 --rdzv-id=llama-run \ #! rendezvous-closed
  train.py
