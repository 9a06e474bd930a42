"""A trainer class, early stopping, a CSV of the losses."""
import argparse
import csv
import os
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, random_split


class Waves(Dataset):
    def __init__(self, n=90):
        g = torch.Generator().manual_seed(5)
        self.phase = torch.rand(n, generator=g)
        self.t = torch.linspace(0, 1, 16)

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        wave = torch.sin(6.28 * (self.t + self.phase[i]))
        return wave[:-1], wave[-1:]


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(15, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.body(x)


class Trainer:
    def __init__(self, model, train_loader, val_loader, lr, device, patience=2, out="trainer-out"):
        self.model = model.to(device)
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.device = device
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.patience = patience
        self.best = float("inf")
        self.bad_epochs = 0
        self.out = Path(out)
        self.out.mkdir(parents=True)

    def train_epoch(self, epoch):
        self.model.train()
        total, count = 0.0, 0
        for inputs, targets in self.train_loader:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            batch_size = inputs.size(0)
            total += loss.item() * batch_size
            count += batch_size
        return total / count

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = []
        for inputs, targets in self.val_loader:
            outputs = self.model(inputs.to(self.device))
            losses.append(self.criterion(outputs, targets.to(self.device)).item())
        return sum(losses) / len(losses)

    def save(self, name):
        torch.save({"model": self.model.state_dict(), "best": self.best}, self.out / name)

    def fit(self, epochs):
        with open(self.out / "losses.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["epoch", "train", "val"])
            for epoch in range(epochs):
                train_loss = self.train_epoch(epoch)
                val_loss = self.validate()
                writer.writerow([epoch, train_loss, val_loss])
                print(f"epoch {epoch}: train {train_loss:.6f} val {val_loss:.6f}")
                if val_loss < self.best - 1e-4:
                    self.best = val_loss
                    self.bad_epochs = 0
                    self.save("best.pt")
                else:
                    self.bad_epochs += 1
                    if self.bad_epochs >= self.patience:
                        print(f"stopping, best {self.best:.6f}")
                        break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, val_set = random_split(Waves(), [72, 18])
    trainer = Trainer(
        Forecaster(args.hidden),
        DataLoader(train_set, batch_size=12, shuffle=True),
        DataLoader(val_set, batch_size=6),
        args.lr,
        device,
    )
    trainer.fit(args.epochs)


if __name__ == "__main__":
    main()
