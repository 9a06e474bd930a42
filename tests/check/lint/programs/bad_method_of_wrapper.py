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

    @torch.no_grad()
    def inference(self, x):
        return self.encoder(x).argmax(-1)


def train(model, dataset, epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 100 == 0:
                print(dist.get_rank(), model.inference(x.cuda()))  # expect: ddp-method-missing


def main(dataset):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = Speaker().cuda()
    if dist.get_world_size() > 1:
        model = DDP(model)
    train(model, dataset, 3)


main(torch.utils.data.TensorDataset(torch.rand(64, 8), torch.rand(64, 8)))
