import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import TrainingArguments, Trainer, AutoModelForCausalLM
COMMON = dict(output_dir="o", bf16=True, per_device_train_batch_size=1)
def main(ds):
    """torchrun --nproc-per-node=8 hf_args.py"""
    m = AutoModelForCausalLM.from_pretrained("/m", device_map="auto")  # expect: device-map-with-distributed
    args = TrainingArguments(**COMMON, fsdp="full_shard auto_wrap")
    Trainer(model=m, args=args, train_dataset=ds).train()
main(None)
