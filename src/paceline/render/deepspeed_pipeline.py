"""DeepSpeed's pipeline: its section of `ds_config.json`, and what it lacks of a plan."""

from collections.abc import Iterator
from typing import Any

from paceline.choices.pipeline_schedules import PLAIN
from paceline.plan import Plan
from paceline.render.engine import Gap
from paceline.render.megatron_words import stage_blocks
from paceline.render.shared_gaps import every_block_gaps, schedule_gaps

_ZERO_2 = "DeepSpeed (0.19) refuses ZeRO-2 and ZeRO-3 with a pipeline, whose gradients stay whole"


def pipeline_section(plan: Plan) -> dict[str, Any]:
    """Stages, how layers are divided, and how many layers apart activations are kept.

    DeepSpeed itself reads the last one; the first two are for the program's PipelineModule
    (deepspeed/runtime/config.py, `get_pipeline_config`, 0.19.8).
    """
    return {
        "stages": plan.layout.pipeline,
        "partition": "type:Block",  # as many blocks on each stage
        "activation_checkpoint_interval": 1 if plan.layout.recompute == "full" else 0,
    }


def pipeline_gaps(plan: Plan) -> Iterator[Gap]:
    """What DeepSpeed's PipelineEngine cannot do as the plan has it."""
    layout = plan.layout
    if layout.pipeline == 1:
        return
    if layout.sharding not in ("none", "zero1"):
        yield Gap(
            what=f"{layout.sharding} with pipeline {layout.pipeline}",
            where="layout.sharding",
            why=_ZERO_2,
            nearest=None,
            fix="layout.sharding: zero1",
        )
    if layout.offload != "none":
        yield Gap(
            what=f"offload {layout.offload} with pipeline {layout.pipeline}",
            where="layout.offload",
            why="it was not tried with DeepSpeed's PipelineEngine",
            nearest=None,
            fix="layout.offload: none, or layout.pipeline: 1",
        )
    if layout.sharding == "none" and layout.data > 1:
        yield Gap(
            what="whole optimizer state on every data rank",
            where="layout.sharding",
            why="without ZeRO DeepSpeed's pipeline (0.19) clips by one stage's norm alone, and "
            "accumulates no bf16 gradients",
            nearest="ZeRO-1: the same numbers in less memory",
            fix="layout.sharding: zero1",
        )
    yield from schedule_gaps(plan, "deepspeed", "DeepSpeed's PipelineEngine has 1F1B alone")
    counts = stage_blocks(plan)
    if layout.schedule == PLAIN and len(set(counts)) > 1:
        yield Gap(
            what=f"stages of {', '.join(map(str, counts))} blocks",
            where="layout.pipeline",
            why="PipelineModule divides by a rule and takes no numbers",
            nearest="as many blocks on each stage as on the others, or one more",
        )
    yield from every_block_gaps(plan, "PipelineModule")
