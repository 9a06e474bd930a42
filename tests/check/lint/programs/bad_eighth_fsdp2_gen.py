import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
def main(loader):
    gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu); dist.init_process_group("nccl")
    m = AutoModelForCausalLM.from_pretrained("x").cuda(); m.gradient_checkpointing_enable()
    for l in m.model.layers: fully_shard(l)
    fully_shard(m)
    for ids in loader:
        out = m.generate(ids.cuda(), max_new_tokens=30, do_sample=True)  # expect: zero3-generate-hang
main(None)
