import argparse
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--workers", type=int, default=2)
    args = p.parse_args()
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.rank = int(os.environ.get("RANK", 0))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if args.distributed:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data) if args.distributed else None
    loader = DataLoader(data, batch_size=8, shuffle=(sampler is None), sampler=sampler, num_workers=args.workers)
    model = torch.nn.Linear(8, 1).to(device)
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            opt.step()
    if args.rank == 0:
        module = model.module if args.distributed else model
        torch.save(module.state_dict(), "model.pt")
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
