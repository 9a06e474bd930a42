import deepspeed
import torch

ACCUMULATION = 4

net = torch.nn.Linear(8, 8)
model, optimizer, loader, _ = deepspeed.initialize(
    model=net, training_data=torch.load("data.pt", weights_only=True), config="ds.json"
)
for step, batch in enumerate(loader):
    loss = model(batch).mean()
    model.backward(loss)
    if (step + 1) % ACCUMULATION == 0:
        model.step()  # expect: engine-step-skipped
