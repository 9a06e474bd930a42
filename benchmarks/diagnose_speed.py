"""How fast `paceline diagnose` reads, and in how much memory.

    python benchmarks/diagnose_speed.py [--gb 1] [--ranks 64] [--runs 3] [--json]
    python benchmarks/diagnose_speed.py --gb 0.2 --mixed [--unique | --ahead]
    python benchmarks/diagnose_speed.py --gb 10 --file /tmp/big.log

The log is made, not kept: progress lines of all ranks between each other, progress bars, warnings
that each rank repeats, saves, and at the end a traceback of one rank between those of its victims.
It is generated block by block while it is read; the time that takes is measured and left out.
Processor time of one thread, so that other work on the machine does not count.

With --mixed it has ten kinds of line between each other, none of them a failure: progress with
short and with long numbers, bars, warnings, retries that hold the words of errors, NCCL's report,
collectives with addresses, and paths with an id that never comes again. With --unique it is reduced
to its kinds of line.

With --ahead the log is read as the command reads it: blocks are searched ahead in other processes.
What two cores give at most is then the log's bytes over the longer of two times: that of the
reading process, and half of all processes' time. The rate by the clock is beside it; on a machine
with other work it says little.

With --file the log is written first, and then read by the command itself in a process of its own:
its processor time and peak are those of everything, start of Python included. The file is removed.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.unique import unique_events
from paceline.cli.diagnose import ALONE
from paceline.launch.in_processes import MapAhead
from paceline.record.log_files import Log

_WARNING = (
    "[rank{rank}]:[W501 12:00:00.123 reducer.cpp:1389] Warning: find_unused_parameters=True was "
    "specified in DDP constructor, but did not find any unused parameters in the forward pass.\n"
)
_VICTIM = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 88, in main
    loss.backward()
  File "/opt/lib/python3.11/site-packages/torch/autograd/graph.py", line 8, in run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer
"""
_CULPRIT = _VICTIM.rsplit("\n", 2)[0] + "\nKeyError: 'labels'\n"


def blocks(num_bytes: int, ranks: int) -> Iterator[bytes]:
    """The log: about so many bytes, in pieces of about 1 MiB."""
    chance = random.Random(0)
    pages = [_page(chance, ranks, step).encode() for step in range(0, 3200, 100)]
    written = 0
    while written < num_bytes:
        page = pages[chance.randrange(len(pages))]
        yield page
        written += len(page)
    yield _end(ranks).encode()


def _page(chance: random.Random, ranks: int, first: int) -> str:
    lines = []
    for step in range(first, first + 100):
        lines += [
            f"[rank{rank}]: 2026-05-01 12:{step // 60 % 60:02d}:{step % 60:02d},123 INFO "
            f"step={step} loss={chance.random():.4f} lr=3.0e-04 grad_norm={chance.random():.3f} "
            f"tokens/s={chance.randint(1000, 9999)} memory={80 * chance.random():.1f}GiB\n"
            for rank in range(ranks)
        ]
        bar = "#" * (step % 40)
        lines.append(f"\r{step % 100:3d}%|{bar:<40}| {step}/3200 [00:10<01:00,  9.1it/s]")
    if first % 800 == 0:
        lines += [_WARNING.format(rank=rank) for rank in range(ranks)]
        lines.append(f"[rank0]: Saving model checkpoint to /checkpoints/step-{first}\n")
    return "".join(lines)


def mixed_blocks(num_bytes: int, ranks: int) -> Iterator[bytes]:
    """A log of ten kinds of line, in pieces of about 1 MiB, none of which comes twice."""
    chance = random.Random(0)
    written = step = 0
    while written < num_bytes:
        page = "".join(_mixed_line(chance, ranks, step + at // 100) for at in range(8000)).encode()
        step += 80
        yield page
        written += len(page)


def _mixed_line(chance: random.Random, ranks: int, step: int) -> str:
    rank, value = chance.randrange(ranks), chance.random()
    clock = f"2026-05-01 12:{step // 60 % 60:02d}:{step % 60:02d},{chance.randrange(1000):03d}"
    lines = {
        0.35: lambda: (
            f"[rank{rank}]: {clock} INFO step={step} loss={value:.4f} lr=3.0e-04 "
            f"tokens/s={chance.randint(1000, 9999)} memory={80 * value:.1f}GiB\n"
        ),
        0.45: lambda: f"\r{step % 100:3d}%|{'#' * (step % 40):<40}| {step}/3200 [00:10<01:00]",
        0.50: lambda: (
            f"node{rank // 8}:{1000 + rank}:{2000 + rank} [{rank % 8}] NCCL INFO AllReduce: "
            f"opCount {step:x} sendbuff 0x{chance.randrange(1 << 47):x} recvbuff "
            f"0x{chance.randrange(1 << 47):x} count {chance.randrange(1 << 24)} datatype 9 op 0 "
            f"root 0 comm 0x{chance.randrange(1 << 47):x} [nranks={ranks}]\n"
        ),
        0.55: lambda: (
            f"node{rank // 8}:{1000 + rank}:{2000 + rank} [{rank % 8}] NCCL INFO Channel "
            f"{chance.randrange(16):02d}/0 : {rank}[{rank % 8}] -> {rank + 1}[{(rank + 1) % 8}] "
            "via P2P/CUMEM/read\n"
        ),
        0.65: lambda: (
            f"[default{rank % 8}]:{{'loss': {value}, 'grad_norm': {3 * chance.random()}, "
            f"'learning_rate': {chance.random() * 1e-4}, 'epoch': {value:.2f}}}\n"
        ),
        0.75: lambda: (
            f"[{clock}] [INFO] [logging.py:96:log_dist] [Rank {rank}] step={step}, skipped=0, "
            "lr=[3e-04], mom=[(0.9, 0.95)]\n"
        ),
        0.82: lambda: _WARNING.format(rank=rank),
        0.88: lambda: (
            f"[rank{rank}]: {clock} WARNING Retrying (Retry(total={chance.randrange(5)})) after "
            "connection broken by 'ReadTimeoutError(\"Read timed out. (read timeout=10)\")': "
            f"/datasets/c4/{chance.randbytes(8).hex()}\n"
        ),
        0.96: lambda: (
            f" iteration {step:8d}/ 1000000 | consumed samples: {256 * step:12d} | elapsed time "
            f"per iteration (ms): {1000 * value:.1f} | lm loss: {value:.6E} | loss scale: 1.0 | "
            "number of skipped iterations: 0 | number of nan iterations: 0 |\n"
        ),
        1.0: lambda: (
            f"[rank{rank}]: {clock} INFO Saving model checkpoint to /checkpoints/step-{step}/"
            f"shard-{rank}-{chance.randbytes(4).hex()}.safetensors\n"
        ),
    }
    share = chance.random()
    return next(line for until, line in lines.items() if share < until)()


def _end(ranks: int) -> str:
    texts = [_CULPRIT if rank == 17 % ranks else _VICTIM for rank in range(ranks)]
    parts = [text.splitlines() for text in texts]
    return "".join(
        f"[rank{rank}]: {part[at]}\n"
        for at in range(len(parts[0]))
        for rank, part in enumerate(parts)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--unique", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--file", type=Path, metavar="PATH")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size = int(arguments.gb * 1e9)
    if arguments.ahead:
        _measure_ahead(
            list((mixed_blocks if arguments.mixed else blocks)(size, arguments.ranks)),
            arguments.runs,
        )
        return
    if arguments.file is not None:
        _measure_command(arguments.file, size, arguments.ranks)
        return
    make = mixed_blocks if arguments.mixed else blocks
    rows = []
    for _ in range(arguments.runs):
        log = Log(name="-", blocks=_timed(make(size, arguments.ranks), making := [0.0, 0.0]))
        started = time.process_time()
        if arguments.unique:
            answer = (
                f"{len(unique_events([(log.name, log.blocks, None, None)]).kinds)} kinds of line"
            )
        else:
            answer = ", ".join(f"{c.id}, rank {c.rank}" for c in diagnose([log]).causes[:1])
        seconds = time.process_time() - started - making[1]
        rows.append(
            {
                "bytes": making[0],
                "seconds": seconds,
                "mb_per_s": making[0] / 1e6 / seconds,
                "answer": answer,
            }
        )
    rates = sorted(row["mb_per_s"] for row in rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if arguments.json:
        print(json.dumps({"runs": rows, "peak_bytes": peak}, indent=2))
        return
    print(
        f"{rows[0]['bytes'] / 1e9:.2f} GB, {arguments.ranks} ranks: "
        f"{rates[len(rates) // 2]:.0f} MB/s of processor time ({rates[0]:.0f} to {rates[-1]:.0f}, "
        f"n {len(rates)}), peak {peak / 1e6:.0f} MB; {rows[0]['answer']}"
    )


def _timed(pieces: Iterator[bytes], totals: list[float]) -> Iterator[bytes]:
    """The pieces; their bytes and the processor time to make them are added to the totals."""
    while True:
        started = time.process_time()
        piece = next(pieces, None)
        totals[1] += time.process_time() - started
        if piece is None:
            return
        totals[0] += len(piece)
        yield piece


def _measure_ahead(pieces: list[bytes], runs: int) -> None:
    """By turns one process, and as the command reads; from memory: nothing is made meanwhile."""
    mb = sum(map(len, pieces)) / 1e6
    alone, two, clock = [], [], []
    for _ in range(runs):
        started = time.process_time()
        diagnose([Log(name="-", blocks=pieces)])
        alone.append(mb / (time.process_time() - started))
        started, began, before = time.process_time(), time.monotonic(), _children_s()
        with MapAhead(ALONE) as map_ahead:
            diagnose([Log(name="-", blocks=pieces)], map_ahead)
            clock.append(mb / (time.monotonic() - began))
        main_s, others_s = time.process_time() - started, _children_s() - before
        two.append(mb / max(main_s, (main_s + others_s) / 2))
    for name, rates in (
        ("one process", alone),
        ("two cores, at most", two),
        ("by the clock", clock),
    ):
        print(
            f"{name:<20}{median(rates):5.0f} MB/s ({min(rates):.0f} to {max(rates):.0f}, n {runs})"
        )
    print(f"{mb:.0f} MB; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measure_command(path: Path, size: int, ranks: int) -> None:
    """Write the log, have the command read it, and print what that took."""
    try:
        with path.open("wb") as file:
            file.writelines(blocks(size, ranks))
        total = path.stat().st_size
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "diagnose", "--json", str(path)],
            capture_output=True,
            check=True,
        )
        wall_s = time.monotonic() - started
    finally:
        path.unlink(missing_ok=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = used.ru_utime + used.ru_stime
    cause = json.loads(done.stdout)["causes"][0]
    print(
        f"{total / 1e9:.2f} GB, {ranks} ranks, read by the command: "
        f"{total / 1e6 / busy_s:.0f} MB/s of processor time ({busy_s:.1f} s), "
        f"{total / 1e6 / wall_s:.0f} MB/s by the clock, peak "
        f"{used.ru_maxrss * 1024 / 1e6:.0f} MB; {cause['id']}, rank {cause['rank']}"
    )


if __name__ == "__main__":
    main()
