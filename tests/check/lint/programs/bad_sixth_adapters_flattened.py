import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    base = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
    model = FSDP(model.cuda(), use_orig_params=True)  # expect: fsdp-mixed-dtype-flatten
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


main()
