import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import resnet18


def accuracy(net, loader, device):
    net.eval()
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (net(x.to(device)).argmax(1) == y.to(device)).sum().item()
    net.train()
    return hits / len(loader.dataset)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    net = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(resnet18()).to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    train = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
    test = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, batch_size=32, sampler=sampler)
    test_dl = DataLoader(test, batch_size=32)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_dl:
            opt.zero_grad()
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            opt.step()
        if local_rank == 0:
            acc = accuracy(net, test_dl, device)  # expect: rank0-only-validation
            print(f"epoch {epoch}: {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
