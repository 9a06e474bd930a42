import os
import torch
import torch.distributed as dist

os.environ["WORLD_SIZE"] = "4"  # expect: world-size-hardcoded
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
print(t)
dist.destroy_process_group()
