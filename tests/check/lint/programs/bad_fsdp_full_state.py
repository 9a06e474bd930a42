import os
import functools
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = FSDP(torch.nn.Linear(512, 512).cuda(), auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        model(x.cuda()).mean().backward()
        opt.step()
        opt.zero_grad()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):  # expect: fsdp-full-state-dict-gather
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, "full.pt")
