import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    def __init__(self, model, dataset, local_rank, epochs):
        self.local_rank = local_rank
        self.epochs = epochs
        self.sampler = DistributedSampler(dataset, drop_last=True)
        self.loader = DataLoader(dataset, batch_size=16, sampler=self.sampler)
        self.model = DDP(model.to(local_rank), device_ids=[local_rank])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for batch in self.loader:
            targets = batch["boxes"].to(self.local_rank)
            if len(targets) == 0:  # expect: rank-divergent-decision
                continue
            loss = self.model(batch["image"].to(self.local_rank), targets)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def fit(self):
        for epoch in range(self.epochs):
            self._epoch(epoch)


def main(dataset, model):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    Trainer(model, dataset, local_rank, 5).fit()
    dist.destroy_process_group()
