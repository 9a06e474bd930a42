"""What this machine shows of a recovery by itself: a tiny job, one rank killed, SHA-256 compared.

Whole commands are started (`preflight`'s look, `drill`, `run`), as a person would start them, and
their JSON is read. Leaves out other machines, and whatever needs a large model.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import JobError
from paceline.record.events import RunFinished, read_events
from paceline.record.run import open_run
from paceline.topology.cards import check_gpus_seen
from paceline.topology.machine import Machine
from paceline.units import counted

MOST_GPUS = 8
"""GPUs tested on one machine. `paceline preflight` and `drill` are for several machines."""

_LIMIT_S = 600.0
"""Seconds for each command. A guess: a drill of this job takes 10 s on two CPU cores, and CUDA
starts in some more."""

_STEPS, _KILLED_STEP = 12, 7

OnNote = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried."""

    name: str
    status: Literal["pass", "fail"]
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selftest:
    """What was shown, and what was not."""

    device: str
    """`4 NVIDIA L4`, or `2 ranks on CPUs`."""

    checks: tuple[Check, ...]
    not_shown: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        """Whether everything that was tried held."""
        return all(check.status == "pass" for check in self.checks)


def choose_ranks(machine: Machine, asked: int | None, *, on_cpu: bool) -> tuple[str, int]:
    """The accelerator for the job file, and how many ranks take part.

    Args:
        machine: This one.
        asked: Ranks; None is all GPUs, or two on CPUs.
        on_cpu: Leave the GPUs alone.

    Raises:
        JobError: `R063`, there are fewer GPUs, or no memory or cores for so many ranks; `T006`,
            the GPUs cannot be seen.
    """
    if not on_cpu:
        check_gpus_seen(machine, "--cpu", "add --cpu")
    num_gpus = 0 if on_cpu else len(machine.gpus)
    most = min(num_gpus, MOST_GPUS) if num_gpus else MOST_GPUS
    ranks = asked if asked is not None else (most if num_gpus else 2)
    if not 1 <= ranks <= most:
        here = f"{num_gpus} GPUs are visible here" if num_gpus else "ranks on CPUs share its cores"
        raise JobError.of(
            code="R063",
            what=f"{counted(ranks, 'rank')} were asked for; {here}, and at most {most} take part",
            where="--ranks",
            fix=f"give 1 to {most}, or leave --ranks out",
        )
    return ("auto" if num_gpus else "cpu"), ranks


def run_selftest(
    machine: Machine, accelerator: str, ranks: int, folder: Path, on_note: OnNote
) -> Selftest:
    """Try everything that so many ranks allow.

    Args:
        machine: This one.
        accelerator: Of `choose_ranks`.
        ranks: Of `choose_ranks`.
        folder: Where the job and its runs are written.
        on_note: Told what is being waited for.
    """
    job = folder / "job.yaml"
    job.write_text(job_text(accelerator, per_node=ranks), encoding="utf-8")
    on_gpus = accelerator != "cpu"
    on_note("looking at this machine, and multiplying matrices on each device")
    checks = [_preflight(job, folder)]
    if checks[0].status == "pass":
        try_it = _kill_one if ranks > 1 else _run_twice
        on_note("a run, and the same run again" + (" with rank 1 killed" if ranks > 1 else ""))
        checks.append(try_it(job, folder))
    kinds = sorted({gpu.name for gpu in machine.gpus}) if on_gpus else []
    return Selftest(
        device=f"{ranks} x {' and '.join(kinds)}" if kinds else f"{counted(ranks, 'rank')} on CPUs",
        checks=tuple(checks),
        not_shown=tuple(_not_shown(on_gpus=on_gpus, ranks=ranks)),
    )


def job_text(
    accelerator: str,
    *,
    per_node: int,
    nodes: int = 1,
    steps: int = _STEPS,
    optimizer: str = "adamw",
) -> str:
    return f"""\
name: selftest
model: {{decoder: {{layers: 2, hidden: 64, heads: 4}}}}
data: {{corpus: python-stdlib, seq_len: 64}}
train:
  {{global_batch: {2 * nodes * per_node}, steps: {steps}, optimizer: {optimizer}, precision: fp32,
  deterministic: true}}
evaluate: {{every: {steps}, samples: {2 * nodes * per_node}}}
cluster: {{accelerator: {accelerator}, nodes: {nodes}, per_node: {per_node}}}
"""


def _preflight(job: Path, folder: Path) -> Check:
    code, answer, why = _command("preflight", str(job), "--runs", str(folder / "runs"))
    if "results" not in answer:
        return Check(name="machine", status="fail", found=_first(answer, why))
    bad = [each for each in answer["results"] if each["status"] == "fail"]
    if code or bad:
        said = "; ".join(f"{each['name']}: {each['evidence']} (fix: {each['fix']})" for each in bad)
        return Check(name="machine", status="fail", found=said or why)
    count = sum(each["status"] == "pass" for each in answer["results"])
    return Check(name="machine", status="pass", found=f"{count} checks of preflight pass")


def _kill_one(job: Path, folder: Path) -> Check:
    """SIGKILL in the backward pass; the state must end as an undisturbed run's does."""
    faults = (f"kill rank=1 step={_KILLED_STEP} phase=backward",)
    found = drilled(job, folder, faults, name="kill a rank", steps=_STEPS)
    if found.status == "fail":
        return found
    return replace(found, found=f"rank 1 killed in step {_KILLED_STEP}, {found.found}")


def drilled(job: Path, folder: Path, faults: Sequence[str], *, name: str, steps: int) -> Check:
    """What `paceline drill` says of these faults in one run.

    Args:
        job: Its file.
        folder: For the runs.
        faults: As `--fault` takes them.
        name: Of the check that comes back.
        steps: Of the run.
    """
    asked = [word for fault in faults for word in ("--fault", fault)]
    code, answer, why = _command(
        "drill", str(job), *asked, "--steps", str(steps), "--runs", str(folder / "runs")
    )
    if "problems" in answer or not answer:
        return Check(name=name, status="fail", found=_first(answer, why))
    return Check(name=name, status="fail" if code else "pass", found=_drill_words(answer))


def _run_twice(job: Path, folder: Path) -> Check:
    """Nobody can be killed for another: the same run twice ends with the same bits."""
    name, digests = "same bits twice", []
    for number in (1, 2):
        out = folder / "runs" / f"run-{number}"
        code, answer, why = _command("run", str(job), "--out", str(out), "--no-report")
        if code:
            return Check(name=name, status="fail", found=_first(answer, why))
        events = read_events(open_run(out).events_file)
        digests += [str(event.state_digest) for event in events if isinstance(event, RunFinished)]
    same = digests[0] == digests[1]
    said = f"SHA-256 {digests[0][:16]} " + ("twice" if same else f"and {digests[1][:16]}")
    return Check(name=name, status="pass" if same else "fail", found=said)


def _command(*words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON it printed, and the end of what it said on standard error."""
    command = [sys.executable, "-m", "paceline", *words, "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, {}, f"paceline {words[0]} did not end within {_LIMIT_S:.0f} s"
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        answer = {}
    return done.returncode, answer, done.stderr.strip()[-400:]


def _drill_words(answer: dict[str, Any]) -> str:
    failing = [f"{each['name']}: {each['says']}" for each in answer["checks"] if not each["ok"]]
    if failing:
        return f"{'; '.join(failing)}; see {answer['run']} (with --keep)"
    held = ", ".join(each["name"] for each in answer["checks"])
    lost = answer["steps_lost"]
    return f"{lost} finished steps lost; checks passed: {held}"


def _first(answer: dict[str, Any], why: str) -> str:
    problems = answer.get("problems") or []
    words = [f"{each['code']}: {each['what']} (fix: {each['fix']})" for each in problems]
    return "; ".join(words) or why or "it gave no answer"


def _not_shown(*, on_gpus: bool, ranks: int) -> Iterator[str]:
    if not on_gpus:
        yield "GPUs and NCCL: the ranks were on CPUs, over gloo"
    if ranks == 1:
        yield "recovery: needs two ranks or more"
    yield "other machines and the network between them: paceline preflight JOB --on ssh"
    yield "your model's memory and speed: paceline plan and paceline prove, and ./test-gpu"
    yield "a GPU that hangs, loses its link or reports errors: no such fault was injected"
