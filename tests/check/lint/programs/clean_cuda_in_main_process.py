import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, rows, device="cpu"):
        self.rows, self.device = rows, device

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i], device=self.device)


def main(rows):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    def collate(samples):
        return torch.stack(samples).to(device)

    pairs = Pairs(rows)
    loader = DataLoader(pairs, 8, sampler=DistributedSampler(pairs), num_workers=2)
    return loader, DataLoader(pairs, 8, sampler=DistributedSampler(pairs), collate_fn=collate)


main(None)
