import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, rows, device):
        self.rows, self.device = rows, device

    def __len__(self):
        return len(self.rows)

    def load(self, i):
        return torch.tensor(self.rows[i], device=self.device)  # expect: cuda-init-before-fork

    def __getitem__(self, i):
        return self.load(i), self.load(i)


class Rows(Pairs):
    def load(self, i):
        return torch.tensor(self.rows[i])


def main(rows):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    def collate(samples):
        return torch.stack([one for one, _ in samples]).to(device)  # expect: cuda-init-before-fork

    pairs, plain = Pairs(rows, device), Rows(rows, "cpu")
    first = DataLoader(pairs, 8, sampler=DistributedSampler(pairs), num_workers=2)
    return first, DataLoader(
        plain, 8, sampler=DistributedSampler(plain), num_workers=2, collate_fn=collate
    )


main(None)
