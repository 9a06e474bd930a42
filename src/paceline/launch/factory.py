"""Count a person's own model in a helper process, so that planning needs no torch here."""

import subprocess
import sys

import msgspec

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.model import how_to_try
from paceline.job.packages import need_package
from paceline.profile import ModuleFacts

_TIMEOUT_S = 300
"""A model is built on the meta device: longer than this it hangs or downloads something."""


def measure_factory(job: Job) -> ModuleFacts | None:
    """What the model that `model.factory` builds costs: parameters, and FLOPs where it can be run.
    None for a job without one.

    Raises:
        JobError: It cannot be imported, raises, or returns no `nn.Module`.
    """
    factory = job.spec.model.factory
    if factory is None:
        return None
    need = "counting a model of your own needs PyTorch"
    need_package("torch", need, where=job.where("model.factory"))
    seq_len = str(job.spec.data.seq_len)
    helper = (sys.executable, "-m", "paceline.runtime.measure_module")
    command = [*helper, str(job.folder), factory, seq_len]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _problem(job, f"building it took longer than {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _problem(job, lines[-1] if lines else f"the helper exited with {done.returncode}")
    printed = done.stdout.splitlines()
    if not printed:
        raise _problem(job, "it ended the program before it returned a module")
    facts = msgspec.json.decode(printed[-1], type=ModuleFacts)
    if facts.num_parameters == 0:
        raise _problem(job, "the module it returned has no parameters")
    return facts


def _problem(job: Job, reason: str) -> JobError:
    return JobError.of(
        code="J009",
        what=f"the model {job.spec.model.factory} could not be built: {reason}",
        where=job.where("model.factory"),
        fix=how_to_try(str(job.spec.model.factory), job.folder),
    )
