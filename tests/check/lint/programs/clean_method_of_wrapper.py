import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Speaker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.encoder(x)

    def inference(self, x):
        return self.encoder(x).argmax(-1)


def main(dataset, epochs):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    distributed = dist.get_world_size() > 1
    model = Speaker().cuda()
    if distributed:
        model = DDP(model)
    sampler = DistributedSampler(dataset)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=8, sampler=sampler):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if hasattr(model, "module"):
            print(dist.get_rank(), model.module.inference(x.cuda()))
        else:
            print(dist.get_rank(), model.inference(x.cuda()))
        plain = model.module if distributed else model
        print(dist.get_rank(), plain.inference(x.cuda()))
        if not distributed:
            print(model.inference(x.cuda()))


main(torch.utils.data.TensorDataset(torch.rand(64, 8), torch.rand(64, 8)), 3)
