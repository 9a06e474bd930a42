"""What files say of a model beyond the sizes that a plan knows: its config.json, and the job."""

from collections.abc import Mapping
from typing import Any

from paceline.job import Job
from paceline.plan import Plan
from paceline.profile import resolve_config


def config_of(job: Job) -> Mapping[str, Any]:
    """The model's config.json; empty where it has none, and of published ones their sizes."""
    found = resolve_config(job)
    if found is None:
        return {}
    config = found.config
    return dict(_DEEPSEEK_V3 if config.get("model_type") == "deepseek_v3" else {}) | dict(config)


_DEEPSEEK_V3: Mapping[str, Any] = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
}
"""What a config.json leaves to transformers: `DeepseekV3Config`."""


def is_renormed(job: Job) -> bool:
    """Whether the weights of a token's experts add up to 1, as always in Mixtral."""
    config = config_of(job)
    return config.get("model_type") == "mixtral" or bool(config.get("norm_topk_prob", False))


def router_coefficient(job: Job) -> float:
    """What the balancing loss is multiplied by: the job's, or the one in the model's config.json;
    0 is none."""
    asked = job.spec.train.router_loss
    return float(config_of(job).get("router_aux_loss_coef", 0) if asked == "auto" else asked)


def rotary_base(plan: Plan, job: Job) -> int | None:
    """Base of rotary positions; None where neither the plan nor a config.json has it."""
    config = config_of(job)
    known = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    known = known if plan.decoder is None else plan.decoder.rope_theta
    return None if known is None else round(known)
