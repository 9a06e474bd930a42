# accelerate launch --num_processes 16 this.py
from accelerate import Accelerator
from datasets import load_dataset
from transformers import AutoTokenizer

accelerator = Accelerator()
tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B")


def tokenize(batch):
    return tok(batch["text"], truncation=True)


def build():
    corpus = load_dataset("allenai/dolma", split="train")
    with accelerator.local_main_process_first():  # expect: rank0-preprocess-timeout
        corpus = corpus.filter(lambda row: len(row["text"]) > 200)
        corpus = corpus.map(tokenize, batched=True, num_proc=32)
    return corpus


train_set = build()
