"""Try a micro-batch for real: one step of the built-in decoder in a helper process."""

import importlib.util
from dataclasses import asdict

from paceline.errors import JobError, RunError
from paceline.job import Job
from paceline.launch.helper import NoAnswer, ask
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
    try:
        return ask("try_batch", request, int, limit_s=_TIMEOUT_S)
    except NoAnswer as error:
        if error.code is not None and (error.code == _DOES_NOT_FIT or error.code < 0):
            return None
        raise RunError.of(
            code="R014",
            what=f"a step in a micro-batch of {micro_batch} failed: the process {error}",
            where=job.where("layout.micro_batch"),
            fix="try a smaller --limit, or leave --measure out",
        ) from None
