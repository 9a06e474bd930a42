import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from early import EarlyStopping


def validate(model, loader):
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += torch.nn.functional.cross_entropy(model.module(x.cuda()), y.cuda()).item()
    return total / len(loader)


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    val = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(torch.nn.Linear(4, 2).cuda())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    stopper = EarlyStopping()
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            opt.step()
            opt.zero_grad()
        if stopper.step(validate(model, val)):  # expect: rank-divergent-decision
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    finally:
        pass
