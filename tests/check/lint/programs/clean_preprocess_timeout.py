import os
from datetime import timedelta
import torch
import torch.distributed as dist
from datasets import load_dataset, load_from_disk
from transformers import AutoTokenizer


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(hours=4))
    tokenizer = AutoTokenizer.from_pretrained("/models/tok")
    if dist.get_rank() == 0:
        raw = load_dataset("json", data_files="/data/*.jsonl", split="train")
        raw.map(lambda row: tokenizer(row["text"]), num_proc=8).save_to_disk("/data/tok")
    dist.barrier()
    print(len(load_from_disk("/data/tok")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
