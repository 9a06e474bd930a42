"""torchrun --nnodes=2 --nproc-per-node=8 bad_sixth_large_copies.py"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-70b-hf")  # expect: host-oom-sigkill
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


main()
