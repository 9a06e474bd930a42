import os

import torch
import torch.distributed as dist
from datasets import load_dataset


def preprocess_corpus(path):
    data = load_dataset("allenai/c4", "en", split="train")
    data.map(lambda row: {"length": len(row["text"])}).save_to_disk(path)


def main():
    if int(os.environ["RANK"]) == 0:  # expect: store-wait-timeout
        preprocess_corpus("corpus")
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.barrier()


main()
