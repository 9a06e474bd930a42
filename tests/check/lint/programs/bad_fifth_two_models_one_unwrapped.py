import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Linear(8, 2)
        self.value = nn.Linear(8, 1)  # expect: ddp-unused-parameters

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.pi(obs))


def main(env):
    dist.init_process_group("gloo")
    actor = DDP(Actor())
    opt = torch.optim.Adam(actor.parameters(), lr=3e-4)
    for obs, act, adv in env:
        logp = actor(obs).log_prob(act)
        loss = -(logp * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
