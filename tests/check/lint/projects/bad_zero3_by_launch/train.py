import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)
if accelerator.is_main_process:
    plain = accelerator.unwrap_model(model)
    prompt = tokenizer("Once", return_tensors="pt").to(accelerator.device)
    print(plain.generate(**prompt))
    plain.save_pretrained(
        "out",
        state_dict=accelerator.get_state_dict(model),  # expect: rank0-only-collective-save
    )
