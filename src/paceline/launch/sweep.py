"""Start a sweep of all-reduce over ranks of this machine, and read what it found.

The program is the one that `paceline render --for network` hands over for several nodes.
"""

import sys
import tempfile
from pathlib import Path

from paceline.errors import JobError
from paceline.job.packages import need_package
from paceline.launch.ranks import Failing, RankProcess, run_ranks, surroundings
from paceline.record.sweep import Sweep, read_sweep
from paceline.render.example import script_text
from paceline.topology.machine import find_local_machine
from paceline.topology.node.reach import free_port
from paceline.units import counted

_FIX = "give them longer with --timeout, or fewer --ranks; NCCL_DEBUG=INFO says more"
_FAILING = Failing(code="R041", where="paceline bench --all-reduce", late=_FIX, died=_FIX)


def sweep_all_reduce(num_ranks: int, *, max_bytes: int, limit_s: float) -> Sweep:
    """Measure 1 KiB to `max_bytes` on so many ranks: NCCL where there are GPUs, else gloo.

    Raises:
        JobError: `R010` without PyTorch, `T002` where there are too few GPUs.
        RunError: `R041`, a rank failed, or they took too long.
    """
    _check(num_ranks)
    with tempfile.TemporaryDirectory(prefix="paceline-sweep-") as name:
        folder = Path(name)
        program, found = folder / "all_reduce.py", folder / "found.json"
        program.write_text(script_text(program.name), encoding="utf-8")
        command = [sys.executable, str(program), "--max-bytes", str(max_bytes)]
        command += ["--json", str(found)]
        port = free_port()
        run_ranks(
            [_rank(rank, num_ranks, command, folder, port) for rank in range(num_ranks)],
            limit_s=limit_s,
            on_progress=lambda line: None,
            failing=_FAILING,
        )
        return read_sweep(found)


def _check(num_ranks: int) -> None:
    need_package("torch", "measuring needs PyTorch")
    gpus = find_local_machine().gpus
    if gpus and num_ranks > len(gpus):
        raise JobError.of(
            code="T002",
            what=f"{counted(num_ranks, 'rank')} were asked for, this machine has {len(gpus)} GPUs",
            where="--ranks",
            fix=f"--ranks {len(gpus)}; over several nodes: `paceline render --for network`",
        )


def _rank(rank: int, world: int, command: list[str], folder: Path, port: int) -> RankProcess:
    environment = surroundings(1) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    log = folder / f"rank-{rank}.log"
    return RankProcess(rank, command, log=log, environment=environment, mark="  ")
