import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, loader, out):
        self.model = DDP(model)
        self.loader = loader
        self.opt = torch.optim.Adam(self.model.parameters())
        self.out = out

    def checkpoint(self, step):
        state = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "step": step}
        torch.save(state, os.path.join(self.out, "latest.pt"))  # expect: all-ranks-save-same-file

    def run(self):
        for step, x in enumerate(self.loader):
            self.opt.zero_grad()
            self.model(x).mean().backward()
            self.opt.step()
            if step % 500 == 0:
                self.checkpoint(step)


def main(loader):
    dist.init_process_group("gloo")
    Trainer(torch.nn.Linear(4, 4), loader, "out").run()
