import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tok = AutoTokenizer.from_pretrained("/models/gpt2")
    model = AutoModelForCausalLM.from_pretrained("/models/gpt2")
    if local_rank == 0:
        tok.add_special_tokens({"pad_token": "<pad>"})
        model.resize_token_embeddings(len(tok))  # expect: ddp-model-differs
    model = DDP(model.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
