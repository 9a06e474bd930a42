import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dev = torch.device(f"cuda:{local_rank}")
    G = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).to(dev), device_ids=[local_rank], broadcast_buffers=False)
    D = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(dev), device_ids=[local_rank], broadcast_buffers=False)
    og, od = torch.optim.Adam(G.parameters(), 1e-4), torch.optim.Adam(D.parameters(), 1e-4)
    data = TensorDataset(torch.randn(256, 32))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            real = real.to(dev)
            fake = G(torch.randn(len(real), 16, device=dev))
            od.zero_grad()
            pred = D(torch.cat([real, fake.detach()]))
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(dev)
            bce(pred, labels).backward()
            od.step()
            og.zero_grad()
            bce(D(fake), torch.ones(len(real), 1, device=dev)).backward()
            og.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
