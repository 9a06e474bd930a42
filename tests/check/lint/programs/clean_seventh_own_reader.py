import glob, os
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class ShardReader:
    def __init__(self, pattern, rank, world, batch):
        files = sorted(glob.glob(pattern))
        self.files = files[rank::world]
        self.batch = batch

    def __iter__(self):
        while True:
            for f in self.files:
                arr = np.load(f)
                for i in range(0, len(arr) - self.batch, self.batch):
                    yield torch.from_numpy(arr[i : i + self.batch])


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(torch.nn.Linear(4, 2).cuda())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    reader = ShardReader("data/*.npy", rank, world, 8)
    for step, batch in zip(range(1000), reader):
        loss = model(batch.cuda()).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


main()
