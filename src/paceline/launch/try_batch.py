"""Try a micro-batch for real: one step of the built-in decoder in a helper process."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict

from paceline.errors import JobError, RunError
from paceline.job import Job
from paceline.plan import Plan

_TIMEOUT_S = 600
_DOES_NOT_FIT = 77
"""Exit code of the helper; see `paceline.runtime.try_batch`."""


def check_measurable(job: Job, plan: Plan) -> None:
    """Only what one rank of this machine holds alone can be tried by one process.

    Raises:
        JobError: The cluster is another one, the model is one's own, or the layout splits it.
    """
    layout, because = plan.layout, None
    fix = "leave --measure out"
    if not plan.cluster.is_local:
        because = f"{plan.cluster.name} is declared, not this machine"
    elif plan.decoder is None:
        because = "the model is not the built-in decoder"
    elif layout.tensor * layout.pipeline * layout.context > 1 or layout.shard_degree > 1:
        because = f"a rank of {layout.name} holds a part of the model, and one process the whole"
        fix = "set layout.sharding=none, or leave --measure out"
    elif importlib.util.find_spec("torch") is None:
        because, fix = "PyTorch is not installed", "pip install torch numpy"
    if because is not None:
        raise JobError.of(
            code="J024",
            what=f"this micro-batch cannot be measured: {because}",
            where=job.where("cluster"),
            fix=fix,
        )


def try_batch(job: Job, plan: Plan, micro_batch: int, *, limit_bytes: int) -> int | None:
    """Bytes at the peak of one step in a micro-batch; None when they are more than the limit.

    A process that ends by a signal counts as one that does not fit: the kernel kills for memory,
    and a library whose allocation is refused may crash.

    Raises:
        RunError: It failed for another reason, or took too long.
    """
    assert plan.decoder is not None, "check_measurable comes first"
    request = {
        "shape": asdict(plan.decoder),
        "seq_len": job.spec.data.seq_len,
        "micro_batch": micro_batch,
        "optimizer": job.spec.train.optimizer,
        "is_bf16": plan.precision == "bf16",
        "device": "cuda" if plan.cluster.backend == "nccl" else "cpu",
        "limit_bytes": limit_bytes,
    }
    command = [sys.executable, "-m", "paceline.runtime.try_batch"]
    text = json.dumps(request).encode()
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _failed(job, micro_batch, f"took longer than {_TIMEOUT_S} s") from None
    if done.returncode == _DOES_NOT_FIT or done.returncode < 0:
        return None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exited with {done.returncode}"
        raise _failed(job, micro_batch, reason)
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def _failed(job: Job, micro_batch: int, reason: str) -> RunError:
    return RunError.of(
        code="R014",
        what=f"a step in a micro-batch of {micro_batch} failed: {reason}",
        where=job.where("layout.micro_batch"),
        fix="try a smaller --limit, or leave --measure out",
    )
