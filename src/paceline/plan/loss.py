"""What the loss is made of: in chunks or of all logits, with or without routers' balancing loss."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.errors import Problem
from paceline.job import Job
from paceline.job.data_rules import objective_of
from paceline.parallel import Layout
from paceline.profile import resolve_config, resolve_decoder

PLAIN_HEADS = (
    *("gemma", "gpt2", "llama", "mistral", "mixtral", "olmo2", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)
"""`model_type`s of transformers whose logits are what their head gives: tests/runtime has each."""

_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields of a config.json by which a model changes its logits after the head."""


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


ROUTER_LOSS_KINDS = ("gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""`model_type`s whose balancing loss is compared with transformers' own: tests/runtime."""


_COEFFICIENTS = {"olmoe": 0.01}
"""`router_aux_loss_coef` that transformers 5.23 takes where a config.json has none; else 0.001."""


def router_loss_of(job: Job) -> float:
    """What Paceline's own trainer multiplies the balancing loss of routed experts by; 0 is none."""
    asked = job.spec.train.router_loss
    if job.spec.engine != "paceline" or job.spec.program is not None:
        return 0.0
    if asked != "auto":
        return asked
    found = None if job.spec.model.factory is not None else resolve_config(job)
    config: Mapping[str, Any] = {} if found is None else found.config
    is_known = config.get("model_type") in ROUTER_LOSS_KINDS
    if not is_known or not config.get("output_router_logits"):
        return 0.0
    return float(config.get("router_aux_loss_coef", _COEFFICIENTS.get(config["model_type"], 0.001)))


def check_router_loss(job: Job, layout: Layout) -> Iterator[Problem]:
    """`L045`: a balancing loss is asked for and cannot be had.

    Args:
        job: As read.
        layout: As chosen.
    """
    asked = job.spec.train.router_loss
    is_named = asked != "auto" and asked > 0
    if job.spec.engine != "paceline" or not (is_named or router_loss_of(job)):
        return
    why = _reason_against_balancing(job, layout)
    if why is not None:
        what, fix = why
        yield Problem(
            code="L045",
            what=f"the balancing loss of routers cannot be computed: {what}",
            where=job.where("train.router_loss"),
            fix=f"{fix}set train.router_loss to 0, which adds none",
        )


def _reason_against_balancing(job: Job, layout: Layout) -> tuple[str, str] | None:
    if job.spec.program is not None or job.spec.model.factory is not None:
        return "the loss of code of your own is its own", "add it there, and "
    if (objective := objective_of(job.spec)) != "next_token":
        return f"nobody has tried it with train.objective {objective}", ""
    asked = resolve_config(job)
    kind = "this model" if asked is None else str(asked.config.get("model_type"))
    if kind not in ROUTER_LOSS_KINDS:
        return f"{kind} has no routers for which it is known", ""
    if layout.pipeline > 1:
        what = "it takes the routers of all layers together, and they are on several stages"
        return what, "set layout.pipeline to 1, or "
    if job.spec.train.compile:
        return "it is not compiled", "leave train.compile out, or "
    return None


def _reason_against(job: Job, layout: Layout) -> str | None:
    if job.spec.program is not None or job.spec.model.factory is not None:
        return "the head and the loss of code of your own are its own"
    if (objective := objective_of(job.spec)) != "next_token":
        return f"train.objective {objective} is not a sum over tokens"
    if layout.pipeline > 1 and not SCHEDULE_FACTS[layout.schedule].ends_at_once:
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
