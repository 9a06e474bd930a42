import torch
from safetensors.torch import save_file


class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(100, 16)
        self.head = torch.nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


model = LM()
save_file(model.state_dict(), "model.safetensors")  # expect: tied-weights
