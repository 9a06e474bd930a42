import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    lr: float = 1e-3
    epochs: int = 3
    batch_size: int = 16
    log_every: int = 10
    out: str = "out"


@dataclass
class Env:
    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environ(cls):
        return cls(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))

    @property
    def is_main(self):
        return self.rank == 0


class Trainer:
    def __init__(self, cfg, env, model, data):
        self.cfg, self.env = cfg, env
        self.device = torch.device("cuda", env.local_rank)
        self.model = DDP(model.to(self.device), device_ids=[env.local_rank])
        self.sampler = DistributedSampler(data, num_replicas=env.world_size, rank=env.rank, drop_last=True)
        self.loader = DataLoader(data, batch_size=cfg.batch_size, sampler=self.sampler, drop_last=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.step = 0

    def log(self, loss):
        value = loss.detach().clone()
        dist.all_reduce(value)
        if self.env.is_main:
            print(self.step, value.item() / self.env.world_size)

    def save(self):
        if not self.env.is_main:
            return
        tmp = os.path.join(self.cfg.out, "model.pt.tmp")
        torch.save(self.model.module.state_dict(), tmp)
        os.replace(tmp, tmp[:-4])

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = torch.nn.functional.mse_loss(self.model(x.to(self.device)), y.to(self.device))
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.step += 1
                if self.step % self.cfg.log_every == 0:
                    self.log(loss)
            self.save()
            dist.barrier()


def main():
    env = Env.from_environ()
    torch.cuda.set_device(env.local_rank)
    dist.init_process_group("nccl")
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    Trainer(Config(), env, torch.nn.Linear(8, 1), data).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
