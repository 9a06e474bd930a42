"""How long four ranks take to check and load a checkpoint, and what the final digest takes.

    .venv/bin/python benchmarks/restore_time.py [pairs] [--before PATH] [--gb 4] [--cold]

Four ranks over gloo hold a model under FSDP2 with AdamW: 12 bytes a parameter, 4 GB in all. Each
round restores the newest checkpoint into a fresh optimizer: every byte is hashed and loaded. Timed
between two barriers, so the slowest rank counts. With `--before`, a checkout of earlier code does
the same with the same files, in turn with this one, and the ratio is of the pairs. The page cache
is warm; with `--cold` the files are dropped from it before each round (posix_fadvise). The digest
is `state_digest` of what was restored; both must give the same one. Processor time is the sum over
the ranks: where other work has the cores too, it says more than the time on the clock.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import interval, machine, ratio_of_medians, spread

WORLD = 4
HIDDEN = 2048
LAYER_BYTES = 12 * HIDDEN * HIDDEN
"""A float32 parameter and its two moments."""


_WHAT = ("restore", "digest")


def main() -> None:
    """Write the checkpoint, measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=int, nargs="?", default=20)
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", choices=_WHAT, help="leave the other out")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        serve(options.rank, options.folder, options.store, round(options.gb * 1e9))
        return
    here = Path(__file__).resolve().parent.parent
    checkouts = {"now": here} | ({"before": options.before} if options.before else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = {
            side: [start(checkout, folder, side, rank, options.gb) for rank in range(WORLD)]
            for side, checkout in checkouts.items()
        }
        print(f"measured; {machine()}")
        tell(sides["now"], "save")
        size = sum(path.stat().st_size for path in folder.rglob("*.distcp"))
        cache = "dropped before each round" if options.cold else "warm"
        print(f"{WORLD} ranks, FSDP2, gloo; {size / 1e9:.2f} GB of data files; page cache {cache}")
        for what in [options.only] if options.only else _WHAT:
            took = rounds(what, sides, options.pairs, folder if options.cold else None)
            report(what, {side: [clock for clock, _ in each] for side, each in took.items()})
            processor = {side: [busy for _, busy in each] for side, each in took.items()}
            report(f"{what}, processor time", processor)
        for ranks in sides.values():
            tell(ranks, "end")


def rounds(
    what: str, sides: dict[str, list[Any]], pairs: int, cold: Path | None
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each round by side, on the clock and of the processor; without the first round."""
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    digests = set()
    for turn in range(pairs + 1):
        for side in sorted(sides, reverse=bool(turn % 2)):
            if cold is not None:
                drop_from_cache(cold)
            answers = [answer.split() for answer in tell(sides[side], what)]
            digests.add(tuple(digest for _, _, digest in answers))
            if turn > 0:
                busy = sum(float(busy) for _, busy, _ in answers)
                seconds[side].append((float(answers[0][0]), busy))
    assert len(digests) == 1, f"not the same state: {digests}"
    return seconds


def report(what: str, seconds: dict[str, list[float]]) -> None:
    """The figures of one thing."""
    for side, values in seconds.items():
        print(f"  {what}, {side}: {spread(values)}")
    if "before" in seconds:
        pairs = list(zip(seconds["now"], seconds["before"], strict=True))
        ratio, low, high = interval(pairs, ratio_of_medians)
        print(f"  {what}, now / before: {ratio:.2f} ({low:.2f}-{high:.2f}, 95 %), n = {len(pairs)}")


def drop_from_cache(folder: Path) -> None:
    """Have the next reader go to the disk."""
    for path in folder.rglob("*.distcp"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(checkout: Path, folder: Path, side: str, rank: int, gb: float) -> Any:
    """A rank of one side, which waits for orders."""
    command = [sys.executable, __file__, "--rank", str(rank), "--gb", str(gb)]
    command += ["--folder", str(folder / "checkpoints"), "--store", str(folder / f"store-{side}")]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)


def tell(ranks: list[Any], order: str) -> list[str]:
    """Have all ranks of a side do something; their answers."""
    for rank in ranks:
        rank.stdin.write(f"{order}\n")
        rank.stdin.flush()
    return [str(rank.stdout.readline()).strip() for rank in ranks]


def serve(rank: int, folder: Path, store: Path, num_bytes: int) -> None:
    """Do what is asked, on one rank."""
    import torch
    import torch.distributed as dist

    from paceline.job import CheckpointSpec
    from paceline.runtime.checkpoint import Checkpointer
    from paceline.runtime.digest import state_digest

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    model = build(max(1, round(num_bytes / LAYER_BYTES)), rank)
    optimizer = torch.optim.AdamW(model.parameters())
    keeper = Checkpointer(folder, CheckpointSpec())
    for line in sys.stdin:
        order, answer = line.strip(), ""
        if order == "end":
            break
        if order == "save":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            keeper.save(1, model, optimizer)
        elif order == "restore":
            optimizer.state.clear()
            took = timed(lambda: keeper.restore_newest(model, optimizer))
            first = optimizer.state_dict()["state"][0]["exp_avg"]
            answer = f"{took[0]} {took[1]} {first.sum().item()}"
        else:
            took = timed(lambda: state_digest(model, optimizer))
            answer = f"{took[0]} {took[1]} {took[2]}"
        print(answer, flush=True)
    dist.destroy_process_group()


def build(layers: int, rank: int) -> Any:
    """A row of square matrices, each sharded over the ranks."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()  # type: ignore[attr-defined]
    return model


def timed(action: Any) -> tuple[float, float, Any]:
    """Seconds between two barriers, this rank's of the processor, and what came of it."""
    import torch.distributed as dist

    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    result = action()
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - start, busy, result


if __name__ == "__main__":
    main()
