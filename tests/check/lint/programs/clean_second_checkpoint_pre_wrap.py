import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ff = torch.nn.Linear(d, d)

    def forward(self, x):
        return checkpoint(self.ff, x, use_reentrant=False)


def main(loader, path):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    net = torch.nn.Sequential(*[Block(8) for _ in range(3)])
    if os.path.exists(path):
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net = net.cuda()
    model = DDP(torch.compile(net), device_ids=[local_rank], gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, x in enumerate(loader):
        opt.zero_grad()
        model(x.cuda()).mean().backward()
        opt.step()
        if step % 100 == 99:
            if dist.get_rank() == 0:
                torch.save(net.state_dict(), path + ".tmp")
                os.replace(path + ".tmp", path)
            dist.barrier()
    dist.destroy_process_group()
