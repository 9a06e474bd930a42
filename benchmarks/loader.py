"""Reading prepared samples: tokens/s a core, what a step waits, and memory over a large index.

    .venv/bin/python benchmarks/loader.py [--python OTHER] [--seconds N]

Tokens are the bytes of the standard library's source, in samples of 2,048, micro-batches of 8 in
the run's random order, one process and one thread. `windows` are cut from the joined text;
`documents` are its files, cut to a sample's length and packed. Beside them PyTorch's DataLoader
over a Hugging Face dataset (arrow, memory-mapped, shuffled, format torch) of the same windows, in
an interpreter that has torch and datasets (`--python`). Files are in the page cache for both.

The wait is `data_s` over `step_s` in a run of one CPU rank on the same windows (a decoder of 2
layers, 128 wide); a CPU reads in the step, so all of the reading is waited for.

Memory is of a process that reads 20 steps of 512 samples from an index of so many, over a sparse
file: `RssAnon` is its own, `RssFile` the mapped pages that it touched and the kernel's read-ahead.
`ids_per_s` is the order alone: a sorted table up to 2^24 samples, computed place by place above.

Exit code 1: windows below 50 M tokens/s a core, or own memory that grows by more than 10 MB from
10^8 to 10^9 samples.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEQ_LEN, MICRO_BATCH = 2048, 8
LEAST_PER_S, MOST_GROWTH = 50e6, 10 << 20
"""The goals of issue 15; the growth is a guess at what counts as flat."""

COUNTS = (10**6, 10**8, 10**9)

JOB = """
name: loader
model: {decoder: {layers: 2, hidden: 128, heads: 4}}
data: {path: text.txt, seq_len: 256, held_out: 0}
cluster: {accelerator: cpu, nodes: 1, per_node: 1}
train: {global_batch: 8, steps: 20, learning_rate: 1.0e-3, precision: fp32}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="an interpreter that has torch and datasets")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked)))
        return
    from figures import machine

    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        rates = {part: run(part, folder, asked) for part in ("windows", "documents")}
        if asked.python:
            rates["datasets"] = run("arrow", folder, asked, python=asked.python)
        for part, found in rates.items():
            print(f"{part}: {found['tokens_per_s'] / 1e6:.1f} M tokens/s a core")
        waiting = share_waiting(folder)
        print(f"a step waits {waiting:.2%} of its time")
        grown = [run("memory", folder, asked, count=count) for count in COUNTS]
        for found in grown:
            print(json.dumps(found))
    is_fast = rates["windows"]["tokens_per_s"] >= LEAST_PER_S
    sys.exit(0 if is_fast and grown[2]["RssAnon"] - grown[1]["RssAnon"] <= MOST_GROWTH else 1)


def run(
    part: str,
    folder: Path,
    asked: argparse.Namespace,
    *,
    python: str = sys.executable,
    count: int = 0,
) -> dict[str, Any]:
    """One part in a process of its own, with one thread."""
    command = [python, __file__, "--part", part, "--folder", str(folder)]
    command += ["--seconds", str(asked.seconds), "--count", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_text(folder: Path) -> None:
    """The files' bytes as tokens: joined in `windows`, packed one by one in `documents`."""
    import numpy as np

    from paceline.prepare.index import ENDS, PACK_DOCUMENTS, PACK_STARTS, TOKENS
    from paceline.prepare.join import pack_documents

    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [text for path in paths if len(text := path.read_bytes()) > 1]
    (folder / "text.txt").write_bytes(b"".join(texts)[: 8 << 20])
    cut = [text[: SEQ_LEN + 1] for text in texts]
    for kind, documents in (("windows", texts), ("documents", cut)):
        (folder / kind).mkdir()
        tokens = np.frombuffer(b"".join(documents), np.uint8).astype("<u2")
        tokens.tofile(folder / kind / TOKENS)
        np.save(folder / kind / ENDS, np.cumsum([len(document) for document in documents]))
    starts, packed = pack_documents(np.array([len(text) - 1 for text in cut]), SEQ_LEN)
    np.save(folder / "documents" / PACK_STARTS, starts)
    np.save(folder / "documents" / PACK_DOCUMENTS, packed)


def open_data(folder: Path, kind: str, *, tokens: int, samples: int, seq_len: int = SEQ_LEN) -> Any:
    from paceline.prepare.index import Index, SourceIndex
    from paceline.runtime.data import PreparedData

    source = SourceIndex(
        name="",
        weight=None,
        folder=kind,
        documents=1,
        tokens=tokens,
        targets=samples * seq_len,
        samples=samples,
        source_files={},
    )
    index = Index(
        tokenizer="bytes",
        vocab=256,
        eos=None,
        seq_len=seq_len,
        pack="windows" if kind == "windows" else "documents",
        dtype="uint16",
        train=(source,),
        held_out=(),
        settings={},
        versions={},
    )
    return PreparedData(folder, index, index.train)


def read_windows(asked: argparse.Namespace) -> dict[str, float]:
    tokens = (asked.folder / "windows" / "tokens.bin").stat().st_size // 2
    samples = (tokens - 1) // SEQ_LEN
    return rate(ours(open_data(asked.folder, "windows", tokens=tokens, samples=samples)), asked)


def read_documents(asked: argparse.Namespace) -> dict[str, float]:
    import numpy as np

    tokens = (asked.folder / "documents" / "tokens.bin").stat().st_size // 2
    samples = len(np.load(asked.folder / "documents" / "pack_starts.npy")) - 1
    return rate(ours(open_data(asked.folder, "documents", tokens=tokens, samples=samples)), asked)


def ours(data: Any) -> Callable[[], Iterator[Any]]:
    """Micro-batches as a rank of a run reads them, step after step."""
    from paceline.runtime.sampling import sample_ids

    def batches() -> Iterator[Any]:
        step = 0
        while True:
            slots = range(MICRO_BATCH)
            yield data.samples(
                sample_ids(
                    step, slots, seed=0, global_batch=MICRO_BATCH, num_samples=data.num_samples
                )
            )
            step += 1

    return batches


def read_arrow(asked: argparse.Namespace) -> dict[str, float]:
    import datasets
    import numpy as np
    from torch.utils.data import DataLoader

    tokens = np.fromfile(asked.folder / "windows" / "tokens.bin", np.uint16)
    count = (len(tokens) - 1) // SEQ_LEN
    rows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(count)]
    features = datasets.Features({"ids": datasets.List(datasets.Value("uint16"))})
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"ids": rows}, features=features)
    made.save_to_disk(str(asked.folder / "arrow"))
    opened = datasets.load_from_disk(str(asked.folder / "arrow")).with_format("torch")

    def batches() -> Iterator[Any]:
        while True:
            for batch in DataLoader(opened, batch_size=MICRO_BATCH, shuffle=True):
                ids = batch["ids"].long()
                yield ids[:, :-1], ids[:, 1:]

    return rate(batches, asked)


def rate(batches: Callable[[], Iterator[Any]], asked: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of processor time, after one pass of warming up."""
    found, given = [], batches()
    for _ in range(3):
        tokens, began, until = 0, time.process_time(), time.perf_counter() + asked.seconds / 3
        while time.perf_counter() < until:
            inputs, targets, *_ = next(given)
            tokens += inputs.numel()
        assert targets.shape == inputs.shape
        found.append(tokens / (time.process_time() - began))
    return {"tokens_per_s": statistics.median(found)}


def share_waiting(folder: Path) -> float:
    """Of a run's steps, the first five left out."""
    (folder / "job.yaml").write_text(JOB)
    command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--out", "run", "--no-report"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()][5:]
    waited: float = sum(line["data_s"] for line in lines) / sum(line["step_s"] for line in lines)
    return waited


def read_memory(asked: argparse.Namespace) -> dict[str, Any]:
    """Memory after reading from an index of `--count` samples, over a sparse file."""
    import numpy as np

    from paceline.prepare.index import ENDS
    from paceline.runtime.sampling import sample_ids

    seq_len, tokens = 8, asked.count * 8 + 1
    folder = asked.folder / f"index-{asked.count}"
    (folder / "windows").mkdir(parents=True)
    with (folder / "windows" / "tokens.bin").open("wb") as file:
        file.truncate(2 * tokens)
    np.save(folder / "windows" / ENDS, np.array([tokens]))
    data = open_data(folder, "windows", tokens=tokens, samples=asked.count, seq_len=seq_len)
    draw, seconds = random.Random(0), 0.0
    for _ in range(20):
        step = draw.randrange(asked.count // 512)
        began = time.perf_counter()
        ids = sample_ids(step, range(512), seed=0, global_batch=512, num_samples=data.num_samples)
        seconds += time.perf_counter() - began
        data.samples(ids)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss = {name: int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "VmHWM")}
    return {"samples": asked.count, **rss, "ids_per_s": 20 * 512 / seconds}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "windows": read_windows,
    "documents": read_documents,
    "arrow": read_arrow,
    "memory": read_memory,
}


if __name__ == "__main__":
    main()
