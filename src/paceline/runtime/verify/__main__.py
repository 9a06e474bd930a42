"""One rank of a verification: meet the others, run the case, write down what was seen.

    python -m paceline.runtime.verify --folder DIR --rank 0 --world 2

`launch/verify.py` starts one for each rank. DIR has `case.json`; this writes `rank-N.json`, and on
rank 0 `reference.json`. How far it is goes to standard error.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from paceline.control.parent import die_with_parent
from paceline.errors import PacelineError
from paceline.record.lines import read_facts, write_facts
from paceline.record.verification import Case, RankFacts
from paceline.runtime._torch_private import load_compiler
from paceline.runtime.verify.program import verify_rank

_TIMEOUT_S = 300


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("rank", "world", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    load_compiler()
    folder, rank = options.folder, options.rank
    case = read_facts(folder / "case.json", Case)
    code = 0
    try:
        facts, reference = verify_rank(
            case,
            folder,
            _meet(case, folder, rank, options.world),
            on_progress=lambda line: _say(line) if rank == 0 else None,
        )
        if reference is not None:
            write_facts(folder / "reference.json", reference)
        write_facts(folder / f"rank-{rank}.json", facts)
        dist.barrier()
    except PacelineError as error:
        write_facts(folder / f"rank-{rank}.json", _only_problems(rank, error))
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort a normal exit


def _meet(case: Case, folder: Path, rank: int, world: int) -> torch.device:
    torch.use_deterministic_algorithms(True, warn_only=case.device != "cpu")
    device = torch.device("cpu")
    if case.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(case.threads)
    dist.init_process_group(
        "gloo" if case.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    return device


def _say(line: str) -> None:
    print(f"verify: {line}", file=sys.stderr, flush=True)


def _only_problems(rank: int, error: PacelineError) -> RankFacts:
    return RankFacts(
        rank=rank,
        world_size=0,
        device="",
        host="",
        pid=os.getpid(),
        tensor=0,
        context=0,
        data=0,
        pipeline=0,
        problems=tuple(error.problems),
    )


if __name__ == "__main__":
    main()
