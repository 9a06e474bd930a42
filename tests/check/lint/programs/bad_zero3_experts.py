import json

import deepspeed
from transformers import AutoModelForCausalLM

settings = dict(train_micro_batch_size_per_gpu=2, bf16=dict(enabled=True), zero_optimization=dict(stage=3))


class Trainer:
    def __init__(self, name="Qwen/Qwen3-30B-A3B-Moe"):
        self.net = AutoModelForCausalLM.from_pretrained(name)
        self.engine, *_ = deepspeed.initialize(config=settings, model=self.net, model_parameters=self.net.parameters())  # expect: zero3-moe-hang

    def step(self, batch):
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return json.dumps({"loss": loss.item()})


if __name__ == "__main__":
    Trainer()
