import os
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder):
    dist.init_process_group("gloo")
    if not os.path.exists(folder):
        os.makedirs(folder)  # expect: folder-race
    mine = f"{folder}/{dist.get_rank()}"
    os.makedirs(mine, exist_ok=True)
    logs = Path(folder) / "logs"
    if not logs.exists():
        logs.mkdir(exist_ok=True)
    if dist.get_rank() == 0 and not os.path.exists("best"):
        os.makedirs("best")
    try:
        if not os.path.exists("cache"):
            os.makedirs("cache")
    except FileExistsError:
        pass
    torch.save(torch.rand(2), f"{mine}/x.pt")


main("out")
