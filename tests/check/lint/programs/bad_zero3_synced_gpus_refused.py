import deepspeed
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
OPTIONS = dict(max_new_tokens=64, do_sample=True, synced_gpus=False)


def show(engine, prompts):
    mine = prompts[dist.get_rank() % len(prompts)]
    return engine.module.generate(**mine, **OPTIONS)  # expect: zero3-generate-hang


def main(loader, prompts):
    keep = HfDeepSpeedConfig(CONFIG)
    model = AutoModelForCausalLM.from_pretrained("/models/a")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
        show(engine, prompts)
    del keep


main(None, [])
