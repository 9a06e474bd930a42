import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.Linear(16, 16).cuda()
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters())
    train_data = TensorDataset(torch.randn(512, 16))
    train_dataloader = DataLoader(train_data, batch_size=16, shuffle=True)  # expect: sampler-missing
    for epoch in range(2):
        for (x,) in train_dataloader:
            model(x.cuda()).mean().backward()
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
