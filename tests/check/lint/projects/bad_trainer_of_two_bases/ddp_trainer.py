import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from base import DDPBase, Trainer


class DDPTrainer(DDPBase, Trainer):
    def __init__(self, config, model, data, rank, world_size):
        Trainer.__init__(self, config)
        DDPBase.__init__(self, model, rank, world_size)
        self.sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
        self.loader = DataLoader(data, batch_size=config.batch, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=0.1)

    def before_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.wrapped(x.cuda()), y.cuda())
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save_checkpoint(self, epoch):
        torch.save(self.wrapped.module.state_dict(), f"{epoch}.pt")
        dist.barrier()
