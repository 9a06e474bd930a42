import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def run(args):
    dist.init_process_group("gloo")
    train = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    train_sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    kwargs = {"batch_size": 8, "num_workers": 2}
    train_loader = DataLoader(train, sampler=train_sampler, **kwargs)
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    train_sampler.set_epoch(0)
    epoch = 0
    while epoch < args.epochs:  # expect: set-epoch-missing
        for x, y in train_loader:
            opt.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            opt.step()
        epoch += 1
