"""Prove a layout in a helper process, so that the command line needs no torch itself.

The helper is started before its request is known: it imports torch, which takes longer than all
else, while the plan is made.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

import msgspec

from paceline.errors import JobError, PacelineError, PlanError, Problem, RunError
from paceline.job import Job
from paceline.job.packages import need_package
from paceline.launch.plannable import planned
from paceline.prove.compare import Compared, compare
from paceline.prove.proof import Proof, Request
from paceline.prove.request import request_of
from paceline.units import bytes_apart

_TIMEOUT_S = 1800


def prove_job(
    read: Callable[[], Job],
    *,
    must_fit: bool = True,
    whole: bool = False,
    wants_trace: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[Proof, Compared]:
    """The proof of the layout that is planned for a job, beside the planner's estimate.

    Args:
        must_fit: Refuse a layout that does not fit by the estimate; else a note says so.

    Raises:
        PacelineError: The job is wrong, or it cannot be proved.
    """
    with Prover(on_progress=on_progress) as prover:
        job = read()
        plan = planned(job, must_fit=must_fit)
        if plan.engine != "paceline":
            on_progress(
                f"Paceline's own runtime is traced with the layout planned for {plan.engine}"
            )
        proof = prover.prove(request_of(job, plan, whole=whole, wants_trace=wants_trace))
    needed = plan.estimate.memory.known_bytes
    if needed > plan.limit_bytes:
        sizes = " a rank, of ".join(bytes_apart(needed, plan.limit_bytes))
        note = f"by the estimate this layout does not fit: {sizes} that may be used"
        proof = replace(proof, notes=(*proof.notes, note))
    return proof, compare(proof, plan)


def proof_data(proof: Proof, compared: Compared) -> bytes:
    """What `prove --json` prints."""
    data = {"proof": proof, "compared": compared, "fits": compared.fits}
    return msgspec.json.format(msgspec.json.encode(data), indent=2)


class Prover:
    """A helper that is starting. Use it in a `with`, for one request."""

    def __init__(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._on_progress = on_progress
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prover":
        need_package("torch", "a proof runs the code of PyTorch")
        command = [sys.executable, "-m", "paceline.prove"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def prove(self, request: Request) -> Proof:
        """The proof.

        Raises:
            JobError: The model cannot be built, or its forward pass looks at values.
            PlanError: The layout does not go together with the model.
            RunError: The helper died or took too long.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        told: list[str] = []
        listener = threading.Thread(target=self._listen, args=(process.stderr, told), daemon=True)
        listener.start()
        watchdog = threading.Timer(_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            process.stdin.write(msgspec.json.encode(request))
            process.stdin.close()
            printed = process.stdout.read().splitlines()
            code = process.wait()
            listener.join()
        except BrokenPipeError:
            code, printed = process.wait(), []
        finally:
            watchdog.cancel()
            process.stdin = None  # closed: `communicate` would flush it
        if code != 0 or not printed:
            raise _died(code, told)
        return _answer(printed[-1])

    def _listen(self, stream: IO[bytes], told: list[str]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip().rpartition("[rank0]: ")[2]
            told.append(line)
            if line.startswith("tracing "):
                self._on_progress(line)


def _answer(line: bytes) -> Proof:
    data: dict[str, Any] = msgspec.json.decode(line)
    if "problems" not in data:
        return msgspec.convert(data, Proof)
    problems = [msgspec.convert(each, Problem) for each in data["problems"]]
    kinds: dict[int, type[PacelineError]] = {3: PlanError, 4: RunError}
    raise kinds.get(data["exit_code"], JobError)(*problems)


def _died(code: int, told: list[str]) -> RunError:
    reason = told[-1] if told else f"it exited with {code}"
    if code < 0:
        reason = f"a signal ({-code}) ended it, or it took longer than {_TIMEOUT_S} s"
    return RunError.of(
        code="F004",
        what=f"the helper that proves layouts failed: {reason}",
        where="python -m paceline.prove",
        fix="take the estimate of `paceline plan`; a model with fewer blocks shows whether it "
        "is the model",
    )
