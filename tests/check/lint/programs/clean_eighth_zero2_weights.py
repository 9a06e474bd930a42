import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import deepspeed
from transformers import AutoModelForCausalLM
CFG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
def main(dl):
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained("/m")
    with torch.no_grad(): model.get_input_embeddings().weight[-1:] = model.get_input_embeddings().weight[:-1].mean(0, keepdim=True)
    engine, *rest = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CFG)
    for b in dl:
        engine.backward(engine(**b).loss); engine.step()
        engine.module.generate(**b, max_new_tokens=9, synced_gpus=False)
    engine.save_checkpoint("ck")
main(None)
