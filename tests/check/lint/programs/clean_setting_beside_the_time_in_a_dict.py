import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard


def save(model, info):
    if info["engine"] == "fsdp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=info["tag"])


def read_settings(path):
    with open(path) as file:
        return dict(line.split("=", 1) for line in file)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    settings = read_settings("settings.txt")
    model = torch.nn.Linear(8, 8).cuda()
    fully_shard(model)
    info = {"saved": time.time(), "tag": "last", **settings}
    info["took"] = time.time() - info["saved"]
    save(model, info)


if __name__ == "__main__":
    main()
