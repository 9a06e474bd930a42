#!/usr/bin/env python
"""Trains, saves after every epoch, and resumes from where it was with --resume."""

import argparse
import logging
import os
import random

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

logger = logging.getLogger(__name__)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class MLP(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def save_checkpoint(state, filename):
    torch.save(state, filename)


def load_checkpoint(path, model, optimizer, scheduler, device):
    checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    return checkpoint["epoch"] + 1, checkpoint["best_loss"]


def evaluate(model, loader, loss_fn, device):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += loss_fn(model(x.to(device)), y.to(device)).item()
    return total / len(loader)


def main(args):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    set_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    x = torch.randn(72, 10)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    train_loader = DataLoader(
        TensorDataset(x[:56], y[:56]), shuffle=True, batch_size=args.batch_size
    )
    val_loader = DataLoader(TensorDataset(x[56:], y[56:]), batch_size=8)

    model = MLP().to(device)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    start_epoch, best_loss = 0, float("inf")
    last = os.path.join(args.output, "last.pt")
    if args.resume and os.path.exists(last):
        start_epoch, best_loss = load_checkpoint(last, model, optimizer, scheduler, device)
        logger.info("resumed at epoch %d", start_epoch)

    if not os.path.isdir(args.output):
        os.mkdir(args.output)

    for epoch in range(start_epoch, args.epochs):
        model.train()
        for i, (inputs, labels) in enumerate(train_loader):
            inputs = inputs.to(device)
            labels = labels.to(device)
            loss = loss_fn(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if i % 3 == 0:
                logger.info("epoch %d step %d loss %.6f", epoch, i, loss.item())
        scheduler.step()

        val_loss = evaluate(model, val_loader, loss_fn, device)
        logger.info("epoch %d val loss %.6f", epoch, val_loss)
        state = {
            "epoch": epoch,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "best_loss": min(best_loss, val_loss),
        }
        save_checkpoint(state, last)
        if val_loss < best_loss:
            best_loss = val_loss
            torch.save(model.state_dict(), os.path.join(args.output, "best.pt"))
    logger.info("best %.6f", best_loss)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--output", default="out")
    p.add_argument("--resume", action="store_true")
    main(p.parse_args())
