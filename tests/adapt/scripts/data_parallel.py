import copy
import os

import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader
from tqdm import tqdm

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(7)


class SeqData(Dataset):
    """Sequences whose label is whether their sum is positive."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, 4, generator=g)
        self.y = (self.x.sum((1, 2)) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 16, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.out(h[-1])


train_set = SeqData(60, 0)
val_set = SeqData(24, 1)
train_loader = DataLoader(train_set, 12, True)
val_loader = DataLoader(val_set, 12)

model = Classifier()
if torch.cuda.device_count() > 1:
    print("Using", torch.cuda.device_count(), "GPUs")
    model = nn.DataParallel(model)
model.to(device)

criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)

best_acc = 0.0
best_weights = copy.deepcopy(model.state_dict())
for epoch in range(3):
    model.train()
    losses = []
    for batch in tqdm(train_loader, desc=f"epoch {epoch}", leave=False):
        x = batch["x"].to(device)
        y = batch["y"].to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    model.eval()
    hits = 0
    with torch.no_grad():
        for batch in val_loader:
            logits = model(batch["x"].to(device))
            hits += (logits.argmax(1).cpu() == batch["y"]).sum().item()
    acc = hits / len(val_set)
    print("epoch %d loss %.6f val acc %.4f" % (epoch, sum(losses) / len(losses), acc))
    if acc > best_acc:
        best_acc = acc
        best_weights = copy.deepcopy(model.state_dict())
        if isinstance(model, nn.DataParallel):
            torch.save(model.module.state_dict(), "best.pth")
        else:
            torch.save(model.state_dict(), "best.pth")

model.load_state_dict(best_weights)
print(f"best accuracy {best_acc:.4f}")
