"""Rank 0 keeps the whole weights before the model is sharded, and scatters them afterwards."""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def shard(model):
    weights = {}
    if dist.get_rank() == 0:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    model.to_empty(device="cuda")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    return model


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = shard(AutoModelForCausalLM.from_pretrained("gpt2"))
dist.destroy_process_group()
