# DataParallel( is not used here; DataLoader(dataset, shuffle=True) is only a comment
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)
from transformers import AutoModelForCausalLM


def build(dataset, sampler):
    return DataLoader(
        dataset,
        batch_size=8,
        sampler=sampler,
        num_workers=2,
        pin_memory=True,
    )


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dataset = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(
        dataset,
        shuffle=True,
    )
    loader = build(dataset, sampler)
    val_loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=8, pin_memory=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pass
    model = DDP(
        torch.nn.Linear(8, 8).cuda(),
        device_ids=[local_rank],
    )
    opt = torch.optim.AdamW(model.parameters())
    for e in range(3):
        sampler.set_epoch(e)
        for (x,) in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x.cuda(non_blocking=True)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            for (x,) in val_loader:
                model(x.cuda(non_blocking=True))
        model.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
