"""How fast a job's data are prepared, in MB/s of text, with one process and with two.

    .venv/bin/python benchmarks/prepare_data.py --tokenizer FOLDER [--megabytes N] [--chats]

The text is the standard library's source, in jsonl files of 8 MB. Beside it, where they are
installed, Hugging Face's `datasets.map` with the same tokenizer and batches of 1,000, as nanoGPT's
prepare.py maps it. `--chats` makes each text the answer of a conversation, which is rendered,
tokenized with offsets and masked. Prints a line of JSON for each.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from paceline.prepare import open_index, prepared
from paceline.spec import parse_job

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
        for count in (1, 2):
            measure(Path(folder), asked.tokenizer.resolve(), count, num_bytes, asked.chats)
        if not asked.chats:
            for count in (1, 2):
                measure_datasets(Path(folder), asked.tokenizer, count, num_bytes)


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
        from datasets import load_dataset
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        print("datasets is not installed: pip install datasets", file=sys.stderr)
        return
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


def show(name: str, count: int, num_bytes: int, seconds: float) -> None:
    speed = num_bytes / 1e6 / seconds
    print(json.dumps({"what": name, "processes": count, "seconds": seconds, "MB/s": speed}))


if __name__ == "__main__":
    main()
