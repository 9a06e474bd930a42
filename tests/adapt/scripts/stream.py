"""Reads an endless-looking stream of samples, not a list of them."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            x = torch.randn(5, generator=g)
            yield x, x.sum().sign()


def train_step(model, optimizer, batch, device):
    x, y = batch[0].to(device), batch[1].to(device)
    loss = F.mse_loss(model(x).squeeze(-1), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(6)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Stream(64, 0), batch_size=8)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        running = 0.0
        num_batches = 0
        for batch in loader:
            loss = train_step(model, optimizer, batch, device)
            running += loss
            num_batches += 1
        print(f"epoch {epoch} loss {running / num_batches:.6f}")


if __name__ == "__main__":
    main()
