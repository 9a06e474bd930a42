import os
import torch
import torch.distributed as dist


def forward_step(stage, x, rank, world, shape, device):
    if rank > 0:
        x = torch.empty(shape, device=device, requires_grad=True)
        dist.recv(x, src=rank - 1)
    y = stage(x)
    if rank < world - 1:
        dist.send(y.detach(), dst=rank + 1)
    return x, y


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    stage = torch.nn.Linear(16, 16).to(device)
    opt = torch.optim.SGD(stage.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(10):
        x, y = forward_step(stage, torch.randn(4, 16, device=device), rank, world, (4, 16), device)
        if rank == world - 1:
            y.mean().backward()
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, src=rank + 1)
            y.backward(grad)
        if rank > 0:
            dist.send(x.grad, dst=rank - 1)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
