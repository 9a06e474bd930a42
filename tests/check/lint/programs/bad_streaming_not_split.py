import os
import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def main(model, collate):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = load_dataset("allenai/c4", "en", split="train", streaming=True)  # expect: iterable-dataset-duplicates
    loader = DataLoader(ds.shuffle(seed=1), batch_size=8, collate_fn=collate)
    model = DDP(model.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters())
    for batch in loader:
        model(**batch).loss.backward()
        opt.step()
        opt.zero_grad()
