import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = SummaryWriter("runs") if rank == 0 else None
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        bar = tqdm(loader, disable=rank != 0)
        for x, y in bar:
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            step += 1
            if step % 50 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean, op=dist.ReduceOp.SUM)
                mean /= dist.get_world_size()
                if writer is not None:
                    writer.add_scalar("loss", mean.item(), step)
                    bar.set_postfix(loss=mean.item())
        if rank == 0:
            torch.save(model.module.state_dict(), "last.pt")
        dist.barrier()
    if writer:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
