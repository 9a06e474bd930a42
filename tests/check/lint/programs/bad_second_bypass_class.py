import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, loader):
        self.model = model
        self.loader = loader
        self.ddp = DDP(self.model)
        self.opt = torch.optim.SGD(self.ddp.parameters(), lr=0.1)

    def train(self):
        for x, y in self.loader:
            pred = self.model(x)  # expect: ddp-forward-bypassed
            loss = torch.nn.functional.mse_loss(pred, y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()


def main(loader):
    dist.init_process_group("gloo")
    Trainer(torch.nn.Linear(8, 1), loader).train()
