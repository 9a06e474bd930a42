import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class DDPBase:
    def __init__(self, model, rank, world_size):
        self._rank = rank
        self._world_size = world_size
        torch.cuda.set_device(rank)
        self.wrapped = DDP(model.to(rank), device_ids=[rank])

    def _should_save(self, epoch):
        return self._rank == 0 and epoch % 2 == 0


class Trainer:
    def __init__(self, config):
        self.config = config
        self.optimizer = None
        self.start_epoch = 0

    def run_epoch(self, epoch):
        total = 0.0
        for x, y in self.loader:
            total += self.run_batch(x, y)
        return total / len(self.loader)

    def train(self):
        self.pre_training()
        for epoch in range(self.start_epoch, self.config.epochs):
            self.before_epoch(epoch)
            self.run_epoch(epoch)
            if self._should_save(epoch):
                self.save_checkpoint(epoch)  # expect: collective-mismatch
        self.post_training()

    def pre_training(self): ...
    def post_training(self): ...
    def before_epoch(self, epoch): ...
