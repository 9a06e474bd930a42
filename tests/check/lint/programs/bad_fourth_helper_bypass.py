import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class LM(torch.nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed = torch.nn.Embedding(100, d)
        self.head = torch.nn.Linear(d, 100)

    def forward(self, ids):
        return self.head(self.embed(ids))


def compute_loss(model, ids):
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main(loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    net = LM().cuda()
    ddp = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(ddp.parameters())
    for ids in loader:
        loss = compute_loss(net, ids.cuda())  # expect: ddp-forward-bypassed
        opt.zero_grad()
        loss.backward()
        opt.step()
