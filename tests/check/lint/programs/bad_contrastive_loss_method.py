"""A loss that is a method of the plain model: its scale is used, and DDP never sees the pass."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from pairs import PairDataset


class DualEncoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.image = nn.Linear(1024, width)
        self.text = nn.Linear(768, width)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, img, txt):
        return F.normalize(self.image(img), dim=-1), F.normalize(self.text(txt), dim=-1)

    def contrastive_loss(self, img, txt):
        a, b = self(img, txt)
        logits = self.scale.exp() * a @ b.t()
        target = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch-size", type=int, default=128)
    args = p.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    ddp = DDP(DualEncoder().cuda(), device_ids=[local_rank])
    core = ddp.module
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
    data = PairDataset("/data/pairs")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, txt in loader:
            loss = core.contrastive_loss(img.cuda(non_blocking=True), txt.cuda(non_blocking=True))  # expect: ddp-forward-bypassed
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(core.state_dict(), "dual.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
