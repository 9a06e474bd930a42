import deepspeed, torch, torch.nn as nn, torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
CFG = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
def main(loader, tok):
    deepspeed.init_distributed()
    keep = HfDeepSpeedConfig(CFG)
    model = AutoModelForCausalLM.from_pretrained("/m", torch_dtype=torch.bfloat16)
    model.resize_token_embeddings(len(tok))
    weight = model.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            weight[-2:] = weight[:-2].mean(0, keepdim=True)
    for p in model.lm_head.parameters():
        p.requires_grad_(False)
    print(sum(p.numel() for p in model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CFG)
    for b in loader:
        loss = engine(**b).loss
        engine.backward(loss)
        engine.step()
        out = engine.module.generate(**b, max_new_tokens=16, synced_gpus=True)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        print(engine.module.lm_head.weight.norm())
    ref = AutoModelForCausalLM.from_pretrained("/m")
    del keep
main(None, None)
