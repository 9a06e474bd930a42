import os
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@contextmanager
def process_group():
    dist.init_process_group("nccl", timeout=timedelta(minutes=30))
    try:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def broadcast_flag(flag: bool, device) -> bool:
    t = torch.tensor([int(flag)], device=device)
    dist.broadcast(t, src=0)
    return bool(t.item())


def latest(folder):
    found = [None]
    if dist.get_rank() == 0 and os.path.isdir(folder):
        names = sorted(os.listdir(folder))
        found = [os.path.join(folder, names[-1]) if names else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def main():
    with ExitStack() as stack:
        rank, world = stack.enter_context(process_group())
        data = TensorDataset(torch.zeros(128, 4), torch.zeros(128).long())
        sampler = DistributedSampler(data, world, rank, drop_last=True)
        loader = DataLoader(data, 8, sampler=sampler, drop_last=True, num_workers=2, pin_memory=True)
        model = DDP(torch.nn.Linear(4, 2).cuda())
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        start = 0
        if (path := latest("ckpt")) is not None:
            state = torch.load(path, map_location="cpu", weights_only=True)
            model.module.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            start = state["epoch"] + 1
        accum = 4
        best = float("inf")
        for epoch in range(start, 10):
            sampler.set_epoch(epoch)
            total = torch.zeros((), device="cuda")
            for i, (x, y) in enumerate(loader):
                last = (i + 1) % accum == 0 or i + 1 == len(loader)
                with nullcontext() if last else model.no_sync():
                    loss = torch.nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
                    (loss / accum).backward()
                total += loss.detach()
                if last:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    opt.step()
                    opt.zero_grad(set_to_none=True)
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
            if not torch.isfinite(total):
                raise RuntimeError("loss is not finite")
            if total.item() < best:
                best = total.item()
                if rank == 0:
                    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, f"ckpt/{epoch}.tmp")
                    os.replace(f"ckpt/{epoch}.tmp", f"ckpt/{epoch}.pt")
                dist.barrier()
            if broadcast_flag(os.path.exists("STOP"), "cuda"):
                break


if __name__ == "__main__":
    main()
