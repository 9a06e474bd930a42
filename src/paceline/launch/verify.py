"""Run a verification's case on this machine: one process for each rank, and their facts."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import JobError, Problem
from paceline.job.packages import check_package
from paceline.launch.ranks import Failing, OnProgress, RankProcess, run_ranks, surroundings
from paceline.record.lines import read_facts, write_facts
from paceline.record.verification import Case, Facts, RankFacts, Reference

_FAILING = Failing(
    code="V004",
    where="paceline verify",
    late="give them longer with --timeout, or fewer --steps or --ranks",
    died="see whether the model runs on one device; other layouts: --layout",
)


def check_verifiable(case: Case) -> Iterator[Problem]:
    """What this machine lacks, before anything is started."""
    yield from check_package("torch", "verifying needs PyTorch")
    if case.config is not None:
        kind = case.config.get("model_type")
        yield from check_package("transformers", f"a {kind} model needs transformers")


def verify_on_ranks(
    case: Case, *, limit_s: float, on_progress: OnProgress = lambda line: None
) -> Facts:
    """What all ranks saw.

    Raises:
        JobError, PlanError: The model cannot be built, or not in this layout.
        RunError: `V004`, a rank failed otherwise, or they took too long.
    """
    JobError.raise_for(check_verifiable(case))
    world = case.layout.num_ranks
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        folder = Path(name)
        write_facts(folder / "case.json", case)
        run_ranks(
            [_rank(rank, world, folder, case) for rank in range(world)],
            limit_s=limit_s,
            on_progress=lambda line: on_progress(f"verify: {line}"),
            failing=_FAILING,
        )
        return Facts(
            case=case,
            reference=read_facts(folder / "reference.json", Reference),
            ranks=tuple(read_facts(_facts_file(folder, rank), RankFacts) for rank in range(world)),
        )


def _facts_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _rank(rank: int, world: int, folder: Path, case: Case) -> RankProcess:
    command = [sys.executable, "-m", "paceline.runtime.verify", "--folder", str(folder)]
    command += ["--rank", str(rank), "--world", str(world), "--parent", str(os.getpid())]
    environment = surroundings(case.threads if case.device == "cpu" else None)
    if case.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(case.threads)
    else:  # cuBLAS gives the same bits again only so: NVIDIA's cuBLAS docs, 2.1.4
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    facts_file = _facts_file(folder, rank)

    def read_problems() -> Sequence[Problem]:
        return read_facts(facts_file, RankFacts).problems if facts_file.exists() else ()

    return RankProcess(
        rank,
        command,
        log=folder / f"err-{rank}",
        environment=environment,
        mark="verify: ",
        read_problems=read_problems,
    )
