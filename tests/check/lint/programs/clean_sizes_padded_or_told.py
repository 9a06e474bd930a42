import torch, torch.distributed as dist
import torch.nn.functional as F
dist.init_process_group("nccl")
def gather_padded(rows, device):
    n = torch.tensor([rows.shape[0]], device=device)
    sizes = [torch.zeros_like(n) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, n)
    m = int(max(sizes))
    if rows.shape[0] < m:
        rows = torch.cat([rows, torch.zeros(m - rows.shape[0], rows.shape[1], device=device)])
    out = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(out, rows)
    return torch.cat([o[:k] for o, k in zip(out, sizes)])
def gather_uneven(rows, device):
    n = torch.tensor(len(rows), device=device)
    sizes = [torch.zeros_like(n) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, n)
    out = [torch.empty(int(k), 6, device=device) for k in sizes]
    dist.all_gather(out, rows)
    return torch.cat(out)
def main(model, loader, device):
    found = []
    hits = torch.zeros(2, device=device)
    for x, y in loader:
        b, s = model(x)
        found.append(b[s > 0.5])
        ok = y != -100
        hits += torch.stack([(s[ok] == y[ok]).sum(), ok.sum()])
        top = s[s > 0.1].mean()
        dist.all_reduce(top)
    dist.all_reduce(hits)
    rows = torch.cat(found)
    gather_padded(rows, device)
    gather_uneven(rows, device)
    buf = torch.zeros(100, 6, device=device)
    buf[: len(rows)] = rows
    out = [torch.empty_like(buf) for _ in range(8)]
    dist.all_gather(out, buf)
    p = F.pad(rows, (0, 0, 0, 100 - len(rows)))
    dist.all_reduce(p)
