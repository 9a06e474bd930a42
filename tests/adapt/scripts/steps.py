"""Trains for a number of steps, whatever an epoch is."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MAX_STEPS = 20
EVAL_EVERY = 5

torch.manual_seed(4)
inputs = torch.randn(48, 6)
targets = inputs @ torch.randn(6, 2)
loader = DataLoader(TensorDataset(inputs[:40], targets[:40]), batch_size=8, shuffle=True, drop_last=True)

net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.05)

step = 0
while step < MAX_STEPS:
    for xb, yb in loader:
        opt.zero_grad()
        loss = ((net(xb) - yb) ** 2).mean()
        loss.backward()
        opt.step()
        step += 1
        if step % EVAL_EVERY == 0:
            net.eval()
            with torch.no_grad():
                held_out = ((net(inputs[40:]) - targets[40:]) ** 2).mean().item()
            net.train()
            print(f"step {step} loss {loss.item():.6f} held out {held_out:.6f}")
        if step >= MAX_STEPS:
            break
