"""How fast `paceline data check` reads, how well it finds near duplicates, and its memory.

    .venv/bin/python benchmarks/data_check.py             # all: 6 GB of disk
    .venv/bin/python benchmarks/data_check.py --megabytes 16 --pairs 50 --rows 100000

Speed: the standard library's source in rows of jsonl, MB of file for each second of one process'
processor time, with all checks, without near duplicates, and counting tokens too with --tokenizer.
MinHash: pairs of texts of 200 words of which some are replaced, so that the true Jaccard similarity
of their shingles lies in steps from 0.5 to 1; a pair is right from 0.8 on. Precision and recall are
over all pairs, and recall by step; pairs are planted among texts that are like none.
Memory: the peak of a process that checks so many rows of 20 words, a tenth of them near duplicates;
and its folder of fingerprints. Prints a line of JSON for each.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prepare_data import write_rows

from paceline.prepare.survey import Asked, survey

LIMIT = 0.8
STEPS = [(low / 100, (low + 5) / 100) for low in range(50, 100, 5)]
WORDS = [f"w{number:05}" for number in range(50_000)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=1000, help="in each step of similarity")
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--tokenizer", type=Path, help="count tokens with it too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_speed(Path(folder), asked.megabytes, asked.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        measure_minhash(Path(folder), asked.pairs)
    for count in asked.rows:
        with tempfile.TemporaryDirectory() as folder:
            measure_memory(Path(folder), count)


def measure_speed(folder: Path, megabytes: int, tokenizer: Path | None) -> None:
    num_bytes = write_rows(folder, megabytes << 20, chats=False)
    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    ways = {"all checks": Asked(files=files), "--near 0": Asked(files=files, near=None)}
    if tokenizer is not None:
        from paceline.cli.data_check import read_tokenizer_named

        read = read_tokenizer_named(str(tokenizer))
        ways["all checks and tokens"] = Asked(files=files, tokenizer=read, seq_len=2048)
    for name, asked in ways.items():
        began, used = time.perf_counter(), time.process_time()
        survey(asked, lambda step: None)
        used = time.process_time() - used
        show("speed", way=name, MB=num_bytes / 1e6, MB_per_s_a_core=num_bytes / 1e6 / used,
             wall_s=time.perf_counter() - began)  # fmt: skip


def shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def similarity(first: list[str], second: list[str]) -> float:
    left, right = shingles(first), shingles(second)
    return len(left & right) / len(left | right)


def measure_minhash(folder: Path, per_step: int) -> None:
    rng = random.Random(0)
    pairs: dict[int, list[tuple[list[str], list[str]]]] = {n: [] for n in range(len(STEPS))}
    while any(len(each) < per_step for each in pairs.values()):
        text = rng.choices(WORDS, k=200)
        other = list(text)
        for place in rng.sample(range(200), rng.randint(1, 16)):
            other[place] = rng.choice(WORDS)
        alike = similarity(text, other)
        step = next((n for n, (low, high) in enumerate(STEPS) if low <= alike < high), None)
        if step is not None and len(pairs[step]) < per_step:
            pairs[step].append((text, other))
    flat = [(step, pair) for step, each in pairs.items() for pair in each]
    texts = [" ".join(text) for _, pair in flat for text in pair]
    texts += [" ".join(rng.choices(WORDS, k=200)) for _ in range(len(texts))]
    # Each second text of a pair is for evaluation, so that every one that is found is counted.
    write_texts(folder / "train.jsonl", texts[: 2 * len(flat) : 2] + texts[2 * len(flat) :])
    found = []
    for step in range(len(STEPS)):
        own = [" ".join(other) for _, other in pairs[step]]
        write_texts(folder / "eval.jsonl", own)
        asked = Asked(
            files=[str(folder / "train.jsonl")],
            eval_files=[str(folder / "eval.jsonl")],
            near=LIMIT,
        )
        found.append(survey(asked, lambda step: None).similar.leaked_near)
        low, high = STEPS[step]
        show("minhash", similarity=f"{low:.2f}-{high:.2f}", pairs=len(own), found=found[-1])
    right = [number for (low, _), number in zip(STEPS, found, strict=True) if low >= LIMIT]
    show(
        "minhash",
        limit=LIMIT,
        precision=sum(right) / max(sum(found), 1),
        recall=sum(right) / (per_step * len(right)),
    )


def write_texts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


def measure_memory(folder: Path, count: int) -> None:
    rng = random.Random(1)
    with (folder / "rows.jsonl").open("w") as file:
        last = WORDS[:20]
        for number in range(count):
            last = [*last[:-1], "edited"] if number % 10 == 9 else rng.choices(WORDS, k=20)
            file.write(f'{{"id": {number}, "text": "{" ".join(last)}"}}\n')
    words = ["data", "check", "rows.jsonl", "--no-keep", "--json"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        check=False,
    )
    data = json.loads(done.stdout)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    show(
        "memory",
        rows=count,
        file_MB=(folder / "rows.jsonl").stat().st_size / 1e6,
        peak_MiB=peak / 2**20,
        wall_s=time.perf_counter() - began,
        near=data["duplicates"]["near"],
    )


def show(what: str, **values: object) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


if __name__ == "__main__":
    main()
