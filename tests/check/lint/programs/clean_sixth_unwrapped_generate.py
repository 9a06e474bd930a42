import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import AutoModelForCausalLM, AutoTokenizer

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)

if accelerator.is_main_process:
    prompt = tokenizer("Once", return_tensors="pt").to(accelerator.device)
    text = accelerator.unwrap_model(model).generate(**prompt, max_new_tokens=20)
    print(tokenizer.decode(text[0]))
accelerator.wait_for_everyone()
