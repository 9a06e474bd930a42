import torch

model = torch.nn.Linear(4, 4)
torch.save(model, "model.pt")
restored = torch.load("model.pt")  # expect: weights-only-load
print(restored(torch.zeros(1, 4)))
