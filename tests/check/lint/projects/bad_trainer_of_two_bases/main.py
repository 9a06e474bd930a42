import argparse
from dataclasses import dataclass
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import TensorDataset
from ddp_trainer import DDPTrainer


@dataclass
class Config:
    epochs: int = 4
    batch: int = 8


def worker(rank, world_size, config):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29501", rank=rank, world_size=world_size)
    data = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
    trainer = DDPTrainer(config, torch.nn.Linear(4, 2), data, rank, world_size)
    trainer.train()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    config = Config(epochs=args.epochs)
    mp.spawn(worker, args=(torch.cuda.device_count(), config), nprocs=torch.cuda.device_count())


if __name__ == "__main__":
    main()
