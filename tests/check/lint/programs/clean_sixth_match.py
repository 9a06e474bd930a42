import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
total = torch.ones(1, device="cuda")
match sys.argv[1]:
    case "sum" | "total":
        dist.all_reduce(total)
    case "max":
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    case other:
        raise SystemExit(f"no {other}")
match dist.get_rank():
    case 0:
        torch.save(total, "total.pt")
    case 1 if len(sys.argv) > 2:
        print(total)
    case _:
        pass
