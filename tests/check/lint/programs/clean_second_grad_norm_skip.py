import math
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=3):
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(ds, seed=3)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, pin_memory=True)
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if epoch == 0 and i >= 100:
                break
            loss = torch.nn.functional.mse_loss(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(norm.item()):
                if rank == 0:
                    print("skipping a step with non-finite gradients")
                continue
            opt.step()
            if rank == 0 and i % 10 == 0:
                print(f"{epoch} {i} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
