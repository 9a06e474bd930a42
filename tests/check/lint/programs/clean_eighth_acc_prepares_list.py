import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
class T:
    def __init__(self, ds):
        self.acc = Accelerator()
        parts = [torch.nn.Linear(4, 4)]
        parts.append(torch.optim.AdamW(parts[0].parameters()))
        loader = DataLoader(ds, batch_size=4, shuffle=True)
        parts.append(loader)
        self.model, self.o, self.loader = self.acc.prepare(*parts)
    def run(self):
        for x in self.loader:
            self.acc.backward(self.model(x).mean()); self.o.step(); self.o.zero_grad()
T(None).run()
