import torch, torch.distributed as dist
from torchvision.ops import nms
dist.init_process_group("nccl")
def gather(t):
    out = [torch.zeros_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous())  # expect: nccl-size-mismatch
    return torch.cat(out)
def run(model, loader):
    kept = []
    for x, y in loader:
        out = model(x)
        for b, s in zip(out["boxes"], out["scores"]):
            kept.append(b[nms(b, s, 0.5)])
    return gather(torch.cat(kept))
def hard(model, loader, device):
    ids = []
    for x, idx in loader:
        loss = model(x)
        for l, i in zip(loss, idx):
            if l.item() > 2.0:
                ids.append(i.item())
    ids = torch.tensor(ids, device=device)
    out = [torch.empty_like(ids) for _ in range(8)]
    dist.all_gather(out, ids)  # expect: nccl-size-mismatch
