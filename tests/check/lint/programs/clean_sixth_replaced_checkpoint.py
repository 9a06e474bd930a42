import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank()
    data = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 2).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = 0
    if os.path.exists("last.pt"):
        state = torch.load("last.pt", map_location="cpu")
        model.module.load_state_dict(state["model"])
        first = state["epoch"] + 1
    for epoch in range(first, 10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            if not torch.isfinite(loss):
                raise RuntimeError(f"the loss is {loss}")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            state = {"model": model.module.state_dict(), "epoch": epoch}
            torch.save(state, "last.pt.new")
            os.replace("last.pt.new", "last.pt")
    dist.destroy_process_group()


main()
