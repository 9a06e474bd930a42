"""Run a script as a person would, on one device or on ranks, and keep what it prints.

Each process is forked from one that has imported torch once. Scripts run in float64, so that what
only the order of additions makes different is far below the printed decimals; and without
shuffling by torch's own generator: the one-device script takes its samples in the order of
`DistributedSampler`, which is what the ranks read.
"""

import multiprocessing
import os
import re
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "numpy"])
# The list of tests/ranks.py: a process has one such server, whoever asks first.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one process left behind."""

    code: int | None
    out: str

    @property
    def lines(self) -> list[str]:
        """What it printed itself: neither warnings nor progress bars."""
        kept = [line.rstrip() for line in self.out.split("\n") if re.search(r"\d\.\d{4}", line)]
        return [line for line in kept if "it/s" not in line and "Warning" not in line]

    @property
    def numbers(self) -> list[float]:
        return [float(each) for line in self.lines for each in re.findall(r"-?\d+(?:\.\d+)?", line)]


def run(
    script: Path,
    ranks: int,
    folder: Path,
    args: Sequence[str] = (),
    *,
    first_epoch: str = "0",
    limit_s: float = 400.0,
) -> list[Ran]:
    """The script in `ranks` processes, 0 for the one-device script; `folder` is where it runs.

    `first_epoch` is what the script calls its first epoch: the seed of that epoch's order.

    Raises:
        AssertionError: A process did not end within the limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    tasks = []
    for rank in range(max(ranks, 1)):
        environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
                       "GLOO_SOCKET_IFNAME": "lo", "FIRST_EPOCH": first_epoch}  # fmt: skip
        if ranks:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }  # fmt: skip
        tasks.append(
            {
                "script": str(script), "args": list(args), "folder": str(folder),
                "environment": environment, "out": str(folder / f"out-{rank}.txt"),
            }
        )  # fmt: skip
    processes = [
        _CONTEXT.Process(
            target=runpy.run_path, args=(__file__, {"TASK": task}, "__rank__"), daemon=True
        )
        for task in tasks
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit_s)
    hung = [number for number, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    outs = [Path(str(task["out"])).read_text() for task in tasks]
    assert not hung, f"ranks {hung} did not end:\n" + "\n".join(outs)
    return [Ran(code=p.exitcode, out=out) for p, out in zip(processes, outs, strict=True)]


def _be_the_script(task: dict) -> None:
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    out = os.open(task["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [task["script"], *task["args"]]
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    _take_the_order_of_ranks()
    code = 0
    try:
        runpy.run_path(task["script"], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _take_the_order_of_ranks() -> None:
    """`shuffle=True` in the order of `DistributedSampler(shuffle=True)`: seed 0 + the epoch."""
    import torch
    from torch.utils.data import RandomSampler

    def order(self):
        epoch = getattr(self, "epochs", int(os.environ["FIRST_EPOCH"]))
        self.epochs = epoch + 1
        generator = torch.Generator().manual_seed(epoch)
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()

    RandomSampler.__iter__ = order


if __name__ == "__rank__":
    _be_the_script(TASK)  # type: ignore[name-defined]  # noqa: F821
