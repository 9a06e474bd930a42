import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(torch.nn.Linear(256, 256).cuda(), auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        model(torch.randn(4, 256).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
            state = model.state_dict()  # expect: rank0-only-collective-save
        torch.save(state, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
