from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
args = TrainingArguments(
    output_dir="out", bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=8, deepspeed="zero3.json", ddp_timeout=7200
)
model = AutoModelForCausalLM.from_pretrained("gpt2")
with args.main_process_first():
    data = load_dataset("HuggingFaceFW/fineweb", split="train").map(lambda b: tokenizer(b["text"]), batched=True)
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
trainer.train(resume_from_checkpoint=True)
trainer.save_model()
