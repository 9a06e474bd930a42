"""Only the training sampler's epoch is set: the order of validation is all one."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def check(model, held_out, device):
    model.eval()
    seen = torch.zeros(2, device=device)
    with torch.inference_mode():
        for inputs, wanted in held_out:
            wrong = torch.nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device))
            seen += torch.stack([wrong, torch.ones_like(wrong)])
    dist.all_reduce(seen)
    model.train()
    return (seen[0] / seen[1]).item()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    world, rank = dist.get_world_size(), dist.get_rank()
    train = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
    held = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    train_sampler = DistributedSampler(train, rank=rank, num_replicas=world, shuffle=True)
    held_sampler = DistributedSampler(held, rank=rank, num_replicas=world)
    loader = DataLoader(train, batch_size=32, sampler=train_sampler, pin_memory=True)
    held_out = DataLoader(held, batch_size=32, sampler=held_sampler, pin_memory=True)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device))
            loss.backward()
            optimizer.step()
        held = check(model, held_out, device)
        if rank == 0:
            print(epoch, held)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
