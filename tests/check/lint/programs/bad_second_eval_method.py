import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Runner:
    def __init__(self, cfg):
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl")
        self.is_main = dist.get_rank() == 0
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).to(self.device)
        self.net = DDP(net, device_ids=[self.device.index])
        self.opt = torch.optim.SGD(self.net.parameters(), lr=cfg["lr"])

    def fit(self, loader, sampler, val, epochs):
        for e in range(epochs):
            sampler.set_epoch(e)
            for x, y in loader:
                self.opt.zero_grad()
                torch.nn.functional.mse_loss(self.net(x.to(self.device)), y.to(self.device)).backward()
                self.opt.step()
            if self.is_main:
                self.validate(val)  # expect: rank0-only-validation

    @torch.no_grad()
    def validate(self, val):
        self.net.eval()
        losses = [torch.nn.functional.mse_loss(self.net(x.to(self.device)), y.to(self.device)).item() for x, y in val]
        print(sum(losses) / len(losses))
        self.net.train()


def main():
    ds = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    runner = Runner({"lr": 0.1})
    sampler = DistributedSampler(ds)
    runner.fit(DataLoader(ds, batch_size=16, sampler=sampler), sampler, DataLoader(ds, batch_size=16), 5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
