import torch
from state import Dist, FirstOnly
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


def main():
    d = Dist()
    with FirstOnly(d):
        data = datasets.CIFAR10("data", download=d.first, transform=transforms.ToTensor())
    sampler = DistributedSampler(data, d.world, d.rank)
    loader = DataLoader(data, 32, sampler=sampler, drop_last=True)
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10)).cuda(), device_ids=[d.local_rank])
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device="cuda")
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            opt.step()
            opt.zero_grad()
            running += loss.detach()
        mean = d.mean(running)
        if d.first:
            print(epoch, mean.item() / len(loader))


main()
