from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(data):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-70B")  # expect: ds-config-before-dist-init
    args = TrainingArguments(output_dir="out", bf16=True, deepspeed={"zero_optimization": {"stage": 3}})
    Trainer(model=model, args=args, train_dataset=data).train()
