import os
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard


def checkpoint(model, optimizer, step):
    model_state, optim_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optim": optim_state}, checkpoint_id=f"out/{step}")


def train(batches):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    model = torch.nn.Linear(16, 16).cuda()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, batch in enumerate(batches):
        model(batch.cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 and dist.get_rank() == 0:
            checkpoint(model, optimizer, step)  # expect: rank0-only-collective-save
