import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.tensorboard import SummaryWriter


def main(loader):
    dist.init_process_group("gloo")
    writer = None
    if dist.get_rank() == 0:
        writer = SummaryWriter()
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if writer is not None:
            mean = loss.detach()
            dist.all_reduce(mean)  # expect: collective-mismatch
            writer.add_scalar("loss", mean.item(), step)
