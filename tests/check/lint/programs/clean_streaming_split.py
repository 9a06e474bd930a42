import os
import torch
import torch.distributed as dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def main(model, collate, max_steps=1000):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = load_dataset("allenai/c4", "en", split="train", streaming=True)
    ds = split_dataset_by_node(ds, rank=dist.get_rank(), world_size=dist.get_world_size())
    loader = DataLoader(ds.shuffle(seed=1), batch_size=8, collate_fn=collate)
    model = DDP(model.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(loader):
        if step >= max_steps:
            break
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
