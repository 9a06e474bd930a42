import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM, AutoTokenizer


def sample(model, tokenizer):
    prompt = tokenizer("Once", return_tensors="pt").to("cuda")
    return model.generate(**prompt)


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    model = FSDP(AutoModelForCausalLM.from_pretrained("gpt2").cuda())
    if dist.get_rank() == 0:
        print(sample(model.module, tokenizer))  # expect: rank0-only-validation
    dist.barrier()


main()
