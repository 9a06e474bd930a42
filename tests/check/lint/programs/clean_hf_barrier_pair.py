import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_and_cache(args):
    if args.local_rank not in [-1, 0]:
        dist.barrier()
    cached = os.path.join(args.data_dir, "cached_train.pt")
    if os.path.exists(cached) and not args.overwrite_cache:
        features = torch.load(cached, weights_only=True)
    else:
        features = torch.randn(256, 8)
        if args.local_rank in [-1, 0]:
            torch.save(features, cached)
    if args.local_rank == 0:
        dist.barrier()
    return TensorDataset(features)


def train(args, dataset, model):
    sampler = RandomSampler(dataset) if args.local_rank == -1 else DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.local_rank != -1:
        model = DDP(model, device_ids=[args.local_rank], output_device=args.local_rank)
    step = 0
    for epoch in range(args.epochs):
        if args.local_rank != -1:
            sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x.to(args.device)).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
            step += 1
            if args.local_rank in [-1, 0] and step % args.save_steps == 0:
                to_save = model.module if hasattr(model, "module") else model
                torch.save(to_save.state_dict(), f"step-{step}.pt")
    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--overwrite_cache", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-5)
    args = parser.parse_args()
    if args.local_rank == -1:
        args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        torch.cuda.set_device(args.local_rank)
        args.device = torch.device("cuda", args.local_rank)
        dist.init_process_group(backend="nccl")
    if args.local_rank not in [-1, 0]:
        dist.barrier()
    model = torch.nn.Linear(8, 8)
    if args.local_rank == 0:
        dist.barrier()
    model.to(args.device)
    train(args, load_and_cache(args), model)


if __name__ == "__main__":
    main()
