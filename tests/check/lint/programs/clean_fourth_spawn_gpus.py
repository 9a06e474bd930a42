import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def worker(gpu, ngpus, args):
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:23456", world_size=ngpus, rank=gpu)
    torch.manual_seed(args["seed"])
    model = DDP(torch.nn.Linear(8, 1).cuda(gpu), device_ids=[gpu])
    torch.manual_seed(args["seed"] + gpu)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data, num_replicas=ngpus, rank=gpu)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x.cuda(gpu)), y.cuda(gpu)).backward()
            opt.step()
        if gpu == 0:
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, f"e{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


def main():
    args = {"epochs": 2, "seed": 3}
    ngpus = torch.cuda.device_count()
    mp.spawn(worker, nprocs=ngpus, args=(ngpus, args))


if __name__ == "__main__":
    main()
