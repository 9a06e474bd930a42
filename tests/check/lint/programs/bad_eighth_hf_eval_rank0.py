import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import TrainingArguments, Trainer, AutoModelForCausalLM
def main(ds):
    args = TrainingArguments("o")
    tr = Trainer(model=AutoModelForCausalLM.from_pretrained("/m"), args=args, train_dataset=ds, eval_dataset=ds)
    tr.train()
    if args.local_rank in (-1, 0):
        print(tr.evaluate())  # expect: rank0-only-validation
main(None)
