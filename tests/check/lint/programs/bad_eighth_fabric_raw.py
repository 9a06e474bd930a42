import torch, lightning as L
from torch.utils.data import DataLoader
def main(ds):
    f = L.Fabric(devices=8, strategy="ddp"); f.launch()
    model = torch.nn.Linear(4, 4)
    model, o = f.setup(model, torch.optim.AdamW(model.parameters()))
    loader = DataLoader(ds, batch_size=4, shuffle=True)  # expect: sampler-missing
    for x in loader:
        f.backward(model(x).mean()); o.step(); o.zero_grad()
main(None)
