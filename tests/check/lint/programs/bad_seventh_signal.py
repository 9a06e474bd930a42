import os, signal
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STOP = False


def handler(signum, frame):
    global STOP
    STOP = True


def main():
    signal.signal(signal.SIGUSR1, handler)
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = TensorDataset(torch.zeros(128, 4), torch.zeros(128).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 2).cuda())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            opt.step()
            opt.zero_grad()
            if STOP:  # expect: rank-divergent-decision
                break
    dist.destroy_process_group()


main()
