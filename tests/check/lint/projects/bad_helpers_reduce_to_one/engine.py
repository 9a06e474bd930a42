import math
import sys
import torch
import comm


def train_one_epoch(model, criterion, loader, optimizer, device, epoch):
    model.train()
    for samples, targets in loader:
        samples, targets = samples.to(device), targets.to(device)
        loss = criterion(model(samples), targets)
        reduced = comm.reduce_dict({"loss": loss.detach()})
        value = reduced["loss"].item()
        if not math.isfinite(value):  # expect: rank-divergent-decision
            print("stopping", value)
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = torch.zeros(1, device=device)
    for samples, targets in loader:
        correct += (model(samples.to(device)).argmax(1) == targets.to(device)).sum()
    comm.synchronize()
    return comm.reduce_dict({"correct": correct.squeeze(0)}, average=False)
