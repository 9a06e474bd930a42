import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM

OPTIONS = {"use_reentrant": True}


class Run:
    def __init__(self, gpu):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained("/models/a"), LoraConfig())
        model.gradient_checkpointing_enable(OPTIONS)
        self.model = DDP(model.to(gpu), device_ids=[gpu])


def main():
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    return Run(gpu)


main()
