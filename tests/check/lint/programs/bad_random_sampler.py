import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
loader = DataLoader(data, batch_size=16, sampler=RandomSampler(data))  # expect: sampler-missing
net = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters())
for epoch in range(4):
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.l1_loss(net(x), y).backward()
        opt.step()
dist.destroy_process_group()
