# accelerate launch --num_processes 16 this.py
from datetime import timedelta

from accelerate import Accelerator, InitProcessGroupKwargs
from datasets import load_dataset
from transformers import AutoTokenizer

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=4))])
tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B")
corpus = load_dataset("allenai/dolma", split="train")
with accelerator.main_process_first():
    corpus = corpus.map(lambda batch: tok(batch["text"]), batched=True, num_proc=32)
