import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def evaluate(model, loader, device, max_batches=100):
    model.eval()
    hits, seen = torch.zeros((), device=device), torch.zeros((), device=device)
    for i, (x, y) in enumerate(loader):
        if i == max_batches:
            break
        pred = model(x.to(device)).argmax(-1)
        hits += (pred == y.to(device)).sum()
        seen += y.numel()
    both = torch.stack([hits, seen])
    gathered = [torch.zeros_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, both)
    hits, seen = torch.stack(gathered).sum(0).tolist()
    model.train()
    return hits / seen


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    train_loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    test_loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(torch.nn.Linear(8, 2).to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    best = 0.0
    for epoch in range(10):
        train_loader.sampler.set_epoch(epoch)
        for x, y in train_loader:
            if x.size(0) < 8:
                continue
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            opt.step()
        acc = evaluate(model, test_loader, device)
        if acc > best:
            best = acc
            if local_rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
            dist.barrier()
        if acc > 0.99:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
