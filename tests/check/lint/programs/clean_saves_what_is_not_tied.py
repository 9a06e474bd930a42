"""A model ties its weights; what is saved is another one's, or is without the shared ones."""

import torch
from safetensors.torch import save_file


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(100, 16)
        self.head = torch.nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight


class Adapter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(16, 4)


model = Tied()
adapter = Adapter()
save_file(adapter.state_dict(), "adapter.safetensors")
state = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
save_file(state, "model.safetensors")
