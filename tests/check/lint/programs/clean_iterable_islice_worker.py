import itertools
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Tokens(IterableDataset):
    def __init__(self, files, seq_len):
        self.files = files
        self.seq_len = seq_len

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        stream = itertools.cycle(self.files)
        for i, name in enumerate(stream):
            if i % (world * workers) == rank * workers + worker:
                yield torch.load(name, weights_only=True)[: self.seq_len]


def main(files, steps=1000):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    loader = iter(DataLoader(Tokens(files, 128), batch_size=8, num_workers=2))
    model = DDP(torch.nn.Linear(128, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        x = next(loader).float().cuda()
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"step{step}.pt")
    dist.destroy_process_group()
