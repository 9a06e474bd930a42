import torch
from transformers import AutoModelForSequenceClassification, TrainingArguments, Trainer, HfArgumentParser
DS = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
def main(ds):
    args = TrainingArguments("out", deepspeed=DS, bf16=True)
    model = AutoModelForSequenceClassification.from_pretrained("/m", num_labels=5, ignore_mismatched_sizes=True)  # expect: zero3-zero-size-params
    with torch.no_grad():
        model.score.weight.zero_()  # expect: zero3-zero-size-params
    Trainer(model, args, train_dataset=ds).train()
main(None)
