"""Which data set is mapped by the first process is said on the command line alone."""

import argparse

from accelerate import Accelerator
from datasets import load_dataset
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--data", default=None)
parser.add_argument("--tokenizer", default="gpt2")
given = parser.parse_args()

accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
raw = load_dataset(given.data)
with accelerator.main_process_first():
    ready = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
accelerator.print(len(ready["train"]))
