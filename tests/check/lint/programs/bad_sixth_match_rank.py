import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
total = torch.ones(1, device="cuda")
match dist.get_rank():
    case 0:
        dist.all_reduce(total)  # expect: collective-mismatch
        print(total.item())
    case _:
        pass
