import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29501", rank=rank, world_size=size)
    torch.manual_seed(1234)
    model = torch.nn.Linear(8, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(128, 8).chunk(size)[rank]
    for epoch in range(5):
        for x in data.split(8):
            opt.zero_grad()
            model(x).mean().backward()
            average_gradients(model)
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
