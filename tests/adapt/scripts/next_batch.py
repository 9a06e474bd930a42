import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(9)


def build_optimizer(model, lr):
    decay, rest = [], []
    for name, p in model.named_parameters():
        (rest if name.endswith("bias") else decay).append(p)
    return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=lr)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(32, 8)
    y = x.cumsum(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.GRU(8, 8, batch_first=True).to(device)
    optimizer = build_optimizer(model, 1e-2)
    batches = iter(loader)
    for it in range(12):
        try:
            xb, yb = next(batches)
        except StopIteration:
            batches = iter(loader)
            xb, yb = next(batches)
        xb, yb = xb.to(device), yb.to(device)
        out, _ = model(xb.unsqueeze(1))
        loss = nn.functional.l1_loss(out.squeeze(1), yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if it % 3 == 0:
            print(f"iter {it}: {loss.item():.6f}")


if __name__ == "__main__":
    main()
