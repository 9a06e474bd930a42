import deepspeed
from deepspeed.utils import set_z3_leaf_modules
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}

model = MixtralForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
