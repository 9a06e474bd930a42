import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

GRAD_ACCUM = 5


def train(loader):
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(ddp_local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[ddp_local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    it = iter(loader)
    for it_num in range(1000):
        for micro_step in range(GRAD_ACCUM):
            model.require_backward_grad_sync = micro_step == GRAD_ACCUM  # expect: no-sync-off-by-one
            x, y = next(it)
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()) / GRAD_ACCUM
            loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
