import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm1 = nn.LayerNorm(d)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Contrastive(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.encoder = Encoder(d)
        self.proj = nn.Linear(d, 32)
        self.predictor: nn.Module = nn.Linear(32, 32)  # expect: ddp-unused-parameters
        self.temperature = 0.07

    def embed(self, x):
        return F.normalize(self.proj(self.encoder(x).mean(1)), dim=-1)

    def forward(self, a, b):
        return self.embed(a) @ self.embed(b).T / self.temperature


def main(loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DistributedDataParallel(Contrastive().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters())
    for a, b in loader:
        logits = model(a.cuda(), b.cuda())
        loss = F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
        opt.zero_grad()
        loss.backward()
        opt.step()
