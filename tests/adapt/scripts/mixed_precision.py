"""Regression with automatic mixed precision."""

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH_SIZE = 8


def build_model():
    return nn.Sequential(
        nn.Linear(20, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )


def get_data():
    torch.manual_seed(0)
    x = torch.randn(80, 20)
    w = torch.randn(20, 1)
    y = x @ w + 0.1 * torch.randn(80, 1)
    return x, y


def main():
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    use_amp = device.type == "cuda"

    x, y = get_data()
    train_ds = TensorDataset(x[:64], y[:64])
    val_x, val_y = x[64:].to(device), y[64:].to(device)
    train_dl = DataLoader(
        train_ds,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=0,
        pin_memory=False,
    )

    model = build_model().to(device)
    criterion = nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler(device.type, enabled=use_amp)

    for epoch in range(EPOCHS):
        model.train()
        epoch_loss = 0
        for xb, yb in train_dl:
            xb = xb.to(device, non_blocking=True)
            yb = yb.to(device, non_blocking=True)
            opt.zero_grad(set_to_none=True)
            with autocast(device_type=device.type, dtype=torch.float16, enabled=use_amp):
                pred = model(xb)
                loss = criterion(pred, yb)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
            epoch_loss += loss.item()

        model.eval()
        with torch.no_grad():
            val_loss = criterion(model(val_x), val_y)
        print(
            "epoch",
            epoch,
            "train",
            round(epoch_loss / len(train_dl), 6),
            "val",
            round(val_loss.item(), 6),
        )


if __name__ == "__main__":
    main()
