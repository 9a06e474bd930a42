import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
ddp_model = DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=1e-3)
for _ in range(100):
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 8).cuda())  # expect: ddp-forward-bypassed
    outputs.pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
