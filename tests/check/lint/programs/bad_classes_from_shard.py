import json
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def load_rows(path, rank, world_size):
    rows = [json.loads(line) for line in open(path)]
    return rows[rank::world_size]


def main():
    dist.init_process_group("gloo")
    rows = load_rows("train.jsonl", dist.get_rank(), dist.get_world_size())
    labels = sorted({row["label"] for row in rows})  # expect: ddp-model-differs
    index = {name: i for i, name in enumerate(labels)}
    model = DDP(torch.nn.Linear(300, len(labels)))
    opt = torch.optim.Adam(model.parameters())
    for step in range(1000):
        row = rows[step % 100]
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(row["x"])[None]), torch.tensor([index[row["label"]]]))
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
