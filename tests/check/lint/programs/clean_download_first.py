"""One rank downloads, the others wait and read the cache; each maps for itself afterwards."""

import os

import torch
import torch.distributed as dist
from datasets import load_dataset

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
name = "wikitext", "wikitext-103-raw-v1"
if dist.get_rank() == 0:
    load_dataset(*name, split="train")
dist.barrier()
text = load_dataset("wikitext", "wikitext-103-raw-v1", split="train")
print(len(text))
dist.destroy_process_group()
