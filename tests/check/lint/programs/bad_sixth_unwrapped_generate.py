import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, AutoTokenizer

accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)

if accelerator.is_main_process:
    prompt = tokenizer("Once", return_tensors="pt").to(accelerator.device)
    plain = accelerator.unwrap_model(model)
    text = plain.generate(**prompt, max_new_tokens=20)  # expect: rank0-only-validation
    print(tokenizer.decode(text[0]))
accelerator.wait_for_everyone()
