import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def load(args, evaluate):
    if args.local_rank not in [-1, 0] and not evaluate:
        dist.barrier()
    data = torch.load("cache.pt")
    if args.local_rank == 0 and not evaluate:
        dist.barrier()
    return data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    if args.local_rank != -1:
        dist.init_process_group("nccl")
    if args.local_rank not in [-1, 0]:
        dist.barrier()  # the first process downloads
    model = torch.nn.Linear(8, 1).cuda(args.local_rank)
    if args.local_rank == 0:
        dist.barrier()
    if args.local_rank != -1:
        model = DistributedDataParallel(model, device_ids=[args.local_rank])
    train(args, model, load(args, evaluate=False))
    if args.local_rank in [-1, 0]:
        print(load(args, evaluate=True))


def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(data.cuda(args.local_rank)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
