import deepspeed
import torch
from transformers import AutoModelForCausalLM

config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
model = AutoModelForCausalLM.from_pretrained("gpt2")
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
for step in range(10):
    loss = engine(torch.zeros(1, 8, dtype=torch.long, device=engine.device)).logits.mean()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint("checkpoints", tag="last")
with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
    state = engine.module.state_dict()
    if engine.global_rank == 0:
        torch.save(state, "model.pt")
