import deepspeed
import torch
from transformers import AutoModelForCausalLM

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def sample(loader):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for batch in loader:
        with torch.no_grad():
            engine.module.generate(batch["input_ids"], max_new_tokens=128)  # expect: zero3-generate-hang
