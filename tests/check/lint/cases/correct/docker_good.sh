docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 --cap-add=IPC_LOCK \
  --device=/dev/infiniband -v $PWD:/w pytorch:2.6 torchrun --standalone --nproc-per-node=8 train.py
docker build -t train:1 .
docker run --rm --gpus all nvidia/cuda:12.4.0-base nvidia-smi
