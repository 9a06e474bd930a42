import os
import torch
import torch.distributed as dist
from datasets import load_dataset, load_from_disk
from transformers import AutoTokenizer


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tokenizer = AutoTokenizer.from_pretrained("/models/tok")
    if dist.get_rank() == 0:  # expect: rank0-preprocess-timeout
        raw = load_dataset("json", data_files="/data/*.jsonl", split="train")
        raw.map(lambda row: tokenizer(row["text"]), num_proc=8).save_to_disk("/data/tok")
    dist.barrier()
    data = load_from_disk("/data/tok")
    print(len(data))


if __name__ == "__main__":
    main()
