"""torchrun --nnodes=2 --nproc-per-node=8 clean_sixth_large_copies.py"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoConfig, AutoModelForCausalLM


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    name = "meta-llama/Llama-2-70b-hf"
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    model.gradient_checkpointing_enable()
    model = FSDP(model, sync_module_states=True, device_id=torch.cuda.current_device())
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


main()
