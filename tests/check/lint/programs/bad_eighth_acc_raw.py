import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
def main(ds):
    acc = Accelerator()
    model = torch.nn.Linear(4, 4)
    o = torch.optim.AdamW(model.parameters())
    loader = DataLoader(ds, batch_size=4, shuffle=True)  # expect: sampler-missing
    model, o = acc.prepare(model, o)
    for e in range(3):
        for x in loader:
            acc.backward(model(x.to(acc.device)).mean()); o.step(); o.zero_grad()
main(None)
