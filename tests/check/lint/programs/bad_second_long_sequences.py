import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

MAX_LEN = 4096


def main(model, loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(model.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for batch in loader:
        if batch["input_ids"].shape[1] > MAX_LEN:  # expect: rank-divergent-decision
            continue
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
