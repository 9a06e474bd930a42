"""One rank of a bench: meet the others, train for a while, write down the times.

    python -m paceline.runtime.bench --run DIR --rank 0 --world 2 --warm-up 3 --timed 20 ...

`launch/bench.py` starts one for each rank. DIR is a run's folder; this writes `times-N.json` into
it. How far it is goes to standard error.
"""

import argparse
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from paceline.control.parent import die_with_parent
from paceline.errors import PacelineError, Problem, reason_of
from paceline.plan import Plan
from paceline.record.bench import RankTimes, Stretch
from paceline.record.lines import write_facts
from paceline.record.run import open_run
from paceline.runtime._torch_private import load_compiler
from paceline.runtime.bench.program import bench_rank
from paceline.runtime.determinism import set_deterministic
from paceline.runtime.devices import DEVICES, device_of

_TIMEOUT_S = 600


def main() -> NoReturn:
    options = _parse()
    die_with_parent(options.parent)
    load_compiler()
    run, rank = open_run(options.run), options.rank
    times_file = run.path / f"times-{rank}.json"
    code = 0
    try:
        device = _meet(run.path, rank, options.world, run.plan())
        stretch = Stretch(warm_up=options.warm_up, timed=options.timed, profiled=options.profiled)
        say = _say if rank == 0 else _be_quiet
        write_facts(times_file, bench_rank(run, device, stretch, on_progress=say))
        dist.barrier()
    except PacelineError as error:
        write_facts(times_file, RankTimes(rank=rank, problems=tuple(error.problems)))
        code = error.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
        write_facts(times_file, RankTimes(rank=rank, problems=(_problem(error),)))
        code = 4
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort a normal exit


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    for name in ("rank", "world", "parent", "warm-up", "timed", "profiled"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def _meet(folder: Path, rank: int, world: int, plan: Plan) -> torch.device:
    device = device_of(plan.cluster.backend, rank)
    set_deterministic(plan.cluster.accelerator == "cpu")  # as in a run that leaves it open
    dist.init_process_group(
        DEVICES[plan.cluster.backend].transports,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    return device


def _problem(error: Exception) -> Problem:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else "a rank"
    return Problem(
        code="R041",
        what=reason_of(error),
        where=place,
        fix="see whether `paceline run` trains the job; other layouts: --layout",
    )


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


def _be_quiet(line: str) -> None:
    pass


if __name__ == "__main__":
    main()
