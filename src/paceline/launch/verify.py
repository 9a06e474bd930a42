"""Run a verification's case on this machine: one process for each rank, and their facts."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.errors import JobError, PacelineError, PlanError, Problem, RunError
from paceline.record.verification import Case, Facts, RankFacts, Reference, read_facts, write_facts

OnProgress = Callable[[str], None]

_PATIENCE_S = 3.0
"""For the other ranks to say what they know, once one has failed. A guess: they notice a closed
connection at once, and write a small file."""

_POLL_S = 0.1


def check_verifiable(case: Case) -> Iterator[Problem]:
    """What this machine lacks, before anything is started."""
    if importlib.util.find_spec("torch") is None:
        yield Problem(
            code="R010",
            what="verifying needs PyTorch, which is not installed",
            where=sys.prefix,
            fix="pip install torch numpy",
        )
    if case.config is not None and importlib.util.find_spec("transformers") is None:
        yield Problem(
            code="R010",
            what=f"a {case.config.get('model_type')} model needs transformers, which is not "
            "installed",
            where=sys.prefix,
            fix="pip install transformers",
        )


def verify_on_ranks(
    case: Case, *, limit_s: float, on_progress: OnProgress = lambda line: None
) -> Facts:
    """What all ranks saw.

    Args:
        case: From `check.verify.small`.
        limit_s: After which the ranks are ended.
        on_progress: Told of every run that begins.

    Raises:
        JobError, PlanError: The model cannot be built, or not in this layout.
        RunError: `V004`, a rank failed otherwise, or they took too long.
    """
    problems = list(check_verifiable(case))
    if problems:
        raise JobError(*problems)
    world = case.layout.num_ranks
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        folder = Path(name)
        write_facts(folder / "case.json", case)
        ranks = [_Rank(rank, world, folder, case) for rank in range(world)]
        try:
            _wait(ranks, limit_s, on_progress)
        finally:
            for rank in ranks:
                rank.end()
        return Facts(
            case=case,
            reference=read_facts(folder / "reference.json", Reference),
            ranks=tuple(read_facts(rank.facts_file, RankFacts) for rank in ranks),
        )


class _Rank:
    """One rank's process."""

    def __init__(self, rank: int, world: int, folder: Path, case: Case) -> None:
        self.rank = rank
        self.facts_file = folder / f"rank-{rank}.json"
        self._err = folder / f"err-{rank}"
        self._told = 0
        command = [sys.executable, "-m", "paceline.runtime.verify", "--folder", str(folder)]
        command += ["--rank", str(rank), "--world", str(world), "--parent", str(os.getpid())]
        environment = dict(os.environ)
        if case.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(case.threads)
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:  # cuBLAS gives the same bits again only so: NVIDIA's cuBLAS docs, 2.1.4
            environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def progress(self) -> Sequence[str]:
        """New lines about how far it is."""
        text = self._err.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()[: text.count("\n")]
        new, self._told = lines[self._told :], len(lines)
        return [line for line in new if line.startswith("verify: ")]

    def problems(self) -> Sequence[Problem]:
        """What a person can mend, if that is why it ended."""
        if not self.facts_file.exists():
            return ()
        return read_facts(self.facts_file, RankFacts).problems

    def last_line(self) -> str:
        """Of what it said about its end."""
        lines = self._err.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = [line for line in lines if not line.startswith(("verify: ", "[rank"))]
        code = self.process.poll()
        return said[-1] if said else f"it ended with {code}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _wait(ranks: Sequence[_Rank], limit_s: float, on_progress: OnProgress) -> None:
    end = time.monotonic() + limit_s
    while True:
        codes = [rank.process.poll() for rank in ranks]
        for line in ranks[0].progress():
            on_progress(line)
        if any(codes):
            raise _failure(ranks)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            what = f"the ranks took longer than {limit_s:.0f} s"
            fix = "give them longer with --timeout, or fewer --steps or --ranks"
            raise RunError(Problem(code="V004", what=what, where="paceline verify", fix=fix))
        time.sleep(_POLL_S)


def _failure(ranks: Sequence[_Rank]) -> PacelineError:
    """What the ranks say: problems a person can mend first, then the first that failed by itself
    and not because another one was gone."""
    first_end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < first_end and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
    for rank in ranks:
        if problems := rank.problems():
            is_plan = all(problem.code.startswith("L") for problem in problems)
            return (PlanError if is_plan else JobError)(*problems)
    failed = [rank for rank in ranks if rank.process.poll()]
    lost = ("Connection closed by peer", "Connection reset", "Broken pipe")
    own = [rank for rank in failed if not any(text in rank.last_line() for text in lost)]
    worst = (own or failed)[0]
    return RunError(
        Problem(
            code="V004",
            what=f"rank {worst.rank} failed: {worst.last_line()[:500]}",
            where="paceline verify",
            fix="see whether the model runs on one device; other layouts: --layout",
        )
    )
