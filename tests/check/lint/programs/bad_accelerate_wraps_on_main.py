import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.load("data.pt", weights_only=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(model)
        model.save_pretrained("out")
        model = accelerator.prepare(model)  # expect: collective-mismatch
