import argparse
import os
import shutil
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm


class AverageMeter(object):
    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target):
    with torch.no_grad():
        correct = (output.argmax(1) == target).float().sum().item()
        return 100.0 * correct / target.size(0)


def get_loaders(args):
    g = torch.Generator().manual_seed(args.seed)
    x = torch.randn(120, 12, generator=g)
    y = (x[:, :3].sum(1) > 0).long()
    train = TensorDataset(x[:96], y[:96])
    val = TensorDataset(x[96:], y[96:])
    return (
        DataLoader(train, batch_size=args.batch_size, shuffle=True, num_workers=0),
        DataLoader(val, batch_size=args.batch_size, shuffle=False),
    )


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def train(loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss")
    top1 = AverageMeter("Acc")
    model.train()
    bar = tqdm(enumerate(loader), total=len(loader))
    for i, (x, y) in bar:
        if args.gpu:
            x = x.cuda(non_blocking=True)
            y = y.cuda(non_blocking=True)
        output = model(x)
        loss = criterion(output, y)
        acc = accuracy(output, y)
        losses.update(loss.item(), x.size(0))
        top1.update(acc, x.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item())
    print(f"epoch {epoch} loss {losses.avg:.6f}")
    print(f"epoch {epoch} rank acc {top1.avg:.4f}")


def validate(loader, model, criterion):
    model.eval()
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc")
    with torch.no_grad():
        for x, y in loader:
            output = model(x)
            losses.update(criterion(output, y).item(), x.size(0))
            top1.update(accuracy(output, y), x.size(0))
    print(f" * loss {losses.avg:.6f} acc {top1.avg:.4f}")
    return top1.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", default=16, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    start = time.time()
    train_loader, val_loader = get_loaders(args)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2))
    if args.gpu:
        model = model.cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    best = 0
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion)
        is_best = acc1 > best
        best = max(acc1, best)
        save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best}, is_best)


if __name__ == "__main__":
    main()
