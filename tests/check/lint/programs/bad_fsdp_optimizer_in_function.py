"""The optimizer is made in a function, before the model is sharded: one fault, one finding."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def build_optimizer(model):
    groups = [{"params": [one for one in model.parameters()]}]
    return torch.optim.AdamW(groups, lr=1e-4)  # expect: fsdp-optimizer-before-wrap


def main(batches):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = AutoModelForCausalLM.from_pretrained("/models/one").cuda()
    optimizer = build_optimizer(model)
    fully_shard(model)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
