"""Where the loss can be computed without all of its logits, and where it is refused by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import Problem
from paceline.parallel import Layout
from paceline.profile import resolve_config, resolve_decoder
from paceline.spec import Job

PLAIN_HEADS = (
    *("gemma", "gpt2", "llama", "mistral", "mixtral", "olmo2", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)
"""`model_type`s of transformers whose logits are what their head gives: tests/runtime has each."""

_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields of a config.json by which a model changes its logits after the head."""

_SCHEDULES = ("1f1b", "interleaved")
"""Orders in which the last stage goes backward at once, so that one micro-batch's gradients of the
head are held, and not those of all."""


def check_loss_chunk(job: Job, layout: Layout) -> Iterator[Problem]:
    """`L044`: `train.loss_chunk` is asked for and cannot be done.

    Args:
        job: As read.
        layout: As chosen.
    """
    if not job.spec.train.loss_chunk or job.spec.engine != "paceline":
        return
    why = _reason_against(job, layout)
    if why is not None:
        yield Problem(
            code="L044",
            what=f"the loss cannot be computed in chunks: {why}",
            where=job.where("train.loss_chunk"),
            fix="set train.loss_chunk to 0, which keeps all logits",
        )


def _reason_against(job: Job, layout: Layout) -> str | None:
    if job.spec.program is not None or job.spec.model.factory is not None:
        return "the head and the loss of code of your own are its own"
    if layout.pipeline > 1 and layout.schedule not in _SCHEDULES:
        return f"with layout.schedule {layout.schedule} each micro-batch would hold its gradients"
    if resolve_decoder(job) is not None:
        return None
    asked = resolve_config(job)
    return None if asked is None else _of_config(asked.config)


def _of_config(config: Mapping[str, Any]) -> str | None:
    for field in _CHANGES:
        if config.get(field) not in (None, 1, 1.0):
            return f"{field} changes the logits after the head"
    kind = str(config.get("model_type"))
    return None if kind in PLAIN_HEADS else f"it is not tested with {kind}"
