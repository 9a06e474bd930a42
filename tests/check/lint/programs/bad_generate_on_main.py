import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def sample(model, tokenizer, prompt):
    ids = tokenizer(prompt, return_tensors="pt").input_ids.cuda()
    with torch.no_grad():
        logits = model(ids).logits
    return tokenizer.decode(logits[0, -1].argmax())


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tokenizer = AutoTokenizer.from_pretrained("/models/llama")
    model = AutoModelForCausalLM.from_pretrained("/models/llama", torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.cuda.current_device(),
                 sharding_strategy=ShardingStrategy.FULL_SHARD)
    rank_zero = dist.get_rank() == 0
    if rank_zero:
        print(sample(model, tokenizer, "Hello"))  # expect: rank0-only-validation
    dist.destroy_process_group()


main()
