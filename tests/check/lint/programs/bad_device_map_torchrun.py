# torchrun --nproc-per-node=4 this.py
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(data):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", device_map="auto")  # expect: device-map-with-distributed
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=1)
    Trainer(model=model, args=args, train_dataset=data).train()
    dist.destroy_process_group()
