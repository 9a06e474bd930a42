"""How fast a job's data are prepared, in MB/s of text, with a process on each core it may use.

    .venv/bin/python benchmarks/prepare_data.py --tokenizer FOLDER [--megabytes N] [--chats]
    taskset -c 0 .venv/bin/python benchmarks/prepare_data.py --tokenizer FOLDER    # one core

The text is the standard library's source, in jsonl files of 8 MB. Beside it, where `datasets` is
installed, with the same tokenizer: Hugging Face's `datasets.map` in batches of 1,000, which leaves
arrow files, and the loop of nanoGPT's data/openwebtext/prepare.py, which maps row by row and copies
1,024 shards into one memory-mapped file (tiktoken's place is taken by the same tokenizer, from the
tokenizers library). The first writes no tokens to read by number; ours and nanoGPT's do. `--chats`
makes each text the answer of a conversation, which is rendered,
tokenized with offsets and masked. Prints a line of JSON for each.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from paceline.job import parse_job
from paceline.prepare import open_index, prepared

FILE_BYTES = 8 << 20

JOB = """
model: {decoder: {layers: 1, hidden: 8, heads: 1, vocab: 1000000}, tokenizer: %s}
train: {global_batch: 1, steps: 1}
data: {path: "*.jsonl", seq_len: 2048, held_out: 0, too_long: %s, cache: cache-%d}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--chats", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_rows(Path(folder), asked.megabytes << 20, asked.chats)
        count = len(os.sched_getaffinity(0))
        measure(Path(folder), asked.tokenizer.resolve(), count, num_bytes, asked.chats)
        if not asked.chats:
            measure_datasets(Path(folder), asked.tokenizer, count, num_bytes)
            measure_nanogpt(Path(folder), asked.tokenizer, count, num_bytes)


def write_rows(folder: Path, num_bytes: int, chats: bool) -> int:
    """Rows of source text, again from the start where there is too little."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [path.read_text(errors="replace")[:4000] for path in paths]
    total, number, place = 0, 0, 0
    while total < num_bytes:
        with (folder / f"{number:04}.jsonl").open("w") as file:
            written = 0
            while written < FILE_BYTES:
                text = texts[place % len(texts)] or "empty"
                place += 1
                written += file.write(json.dumps(row(text) if chats else {"text": text}) + "\n")
        total, number = total + written, number + 1
    return total


def row(text: str) -> dict[str, object]:
    turns = [("user", "Write a module of the standard library."), ("assistant", text)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def measure(folder: Path, tokenizer: Path, count: int, num_bytes: int, chats: bool) -> None:
    text = JOB % (tokenizer, "cut" if chats else "refuse", count)
    job = parse_job(text, source="benchmark", folder=folder)
    began = time.perf_counter()
    index = open_index(prepared(job, processes=count))
    show("paceline", count, num_bytes, time.perf_counter() - began)
    tokens = sum(source.tokens for source in (*index.train, *index.held_out))
    print(json.dumps({"tokens": tokens, "padding": index.train[0].padding(index.seq_len)}))


def measure_datasets(folder: Path, tokenizer: Path, count: int, num_bytes: int) -> None:
    try:
        from datasets import disable_progress_bars, load_dataset
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        print("datasets is not installed: pip install datasets", file=sys.stderr)
        return
    disable_progress_bars()
    made = PreTrainedTokenizerFast.from_pretrained(str(tokenizer))
    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    rows = load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "hf"))
    began = time.perf_counter()
    rows.map(
        lambda batch: {"ids": made(batch["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        num_proc=count,
        remove_columns=["text"],
        load_from_cache_file=False,
    )
    show("datasets.map", count, num_bytes, time.perf_counter() - began)


def measure_nanogpt(folder: Path, tokenizer: Path, count: int, num_bytes: int) -> None:
    try:
        import numpy as np
        from datasets import load_dataset
        from tokenizers import Tokenizer
    except ImportError:
        return
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    is_narrow = encoder.get_vocab_size() <= 1 << 16
    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    rows = load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "hf"))

    def process(example: dict[str, str]) -> dict[str, object]:
        ids = encoder.encode(example["text"], add_special_tokens=False).ids
        ids.append(0)
        return {"ids": ids, "len": len(ids)}

    began = time.perf_counter()
    tokenized = rows.map(
        process, remove_columns=["text"], num_proc=count, load_from_cache_file=False
    )
    length = int(np.sum(tokenized["len"], dtype=np.uint64))
    dtype = np.uint16 if is_narrow else np.uint32
    array = np.memmap(folder / f"train-{count}.bin", dtype=dtype, mode="w+", shape=(length,))
    at, shards = 0, min(1024, len(tokenized))
    for number in range(shards):
        part = tokenized.shard(num_shards=shards, index=number, contiguous=True)
        batch = np.concatenate(part.with_format("numpy")["ids"])
        array[at : at + len(batch)] = batch
        at += len(batch)
    array.flush()
    show("nanoGPT's prepare.py", count, num_bytes, time.perf_counter() - began)


def show(name: str, count: int, num_bytes: int, seconds: float) -> None:
    speed = num_bytes / 1e6 / seconds
    print(json.dumps({"what": name, "processes": count, "seconds": seconds, "MB/s": speed}))


if __name__ == "__main__":
    main()
