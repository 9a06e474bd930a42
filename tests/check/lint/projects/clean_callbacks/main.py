import os
from argparse import Namespace
from functools import partial
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

REGISTRY = {}


def register(name):
    def add(fn):
        REGISTRY[name] = fn
        return fn
    return add


@register("linear")
def linear(width):
    return torch.nn.Linear(width, 2)


def hooks(model, every, rank):
    def log(step, loss):
        if rank == 0 and step % every == 0:
            print(step, float(loss))

    def save(step, **_):
        if step % every:
            return
        if (path := os.environ.get("OUT", "")) and rank == 0:
            torch.save(model.module.state_dict(), f"{path}/{step}.pt")

    return [log, save]


def fit(model, loader, opt, callbacks, scale=lambda loss: loss):
    for step, (x, y) in enumerate(loader):
        loss = scale(torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()))
        loss.backward()
        opt.step()
        opt.zero_grad()
        for call in callbacks:
            call(step, loss=loss)


def main(args: Namespace = Namespace(epochs=3, every=10)):
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    model = DDP(REGISTRY["linear"](4).cuda(local), device_ids=[local])
    data = TensorDataset(torch.zeros(100, 4), torch.zeros(100).long())
    make = partial(DataLoader, data, batch_size=8, num_workers=2)
    sampler = DistributedSampler(data, seed=3)
    loader = make(sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        fit(model, loader, torch.optim.SGD(model.parameters(), 0.1), hooks(model, args.every, rank))
        torch.distributed.barrier(device_ids=[local])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
