import deepspeed
from transformers import AutoModelForCausalLM

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def main(loader, prompts):
    model = AutoModelForCausalLM.from_pretrained("deepseek-ai/deepseek-llm-7b-base")
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    engine.module.generate(prompts, max_new_tokens=64, synced_gpus=True)
