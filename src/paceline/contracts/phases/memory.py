"""Phase 7: what the fullest rank holds, and what would make it hold less."""

import re
from typing import Any

from paceline.contracts.phases.case import Case
from paceline.contracts.phases.required import savings
from paceline.contracts.phases.resources import available_of
from paceline.plan.infeasible import ways_of
from paceline.units import format_bytes

_STAGES = {"none": 0, "zero1": 1, "zero2": 2, "full": 3, "hybrid": 3}
_BREAKDOWN = {
    "params": ("parameters", "master copy"),
    "activations": ("activations",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "overhead": ("overhead", "slack"),
}
"""The schema's word -> parts of the estimate; what is left are buffers."""


def optimise_memory(case: Case) -> dict[str, Any]:
    """The plan's memory by part, the gap where there is one, and what would close it."""
    plan, layout = case.plan, case.plan.layout
    memory = plan.estimate.memory
    moved = "nothing" if layout.offload == "none" else f"{layout.offloaded} on {layout.offload}"
    gradients = memory.parts.get("gradients")
    if layout.offload_parameters and gradients:
        moved += f"; the {format_bytes(gradients)} of gradients here move once they are reduced"
    available = int(available_of(case) * (1 - case.job.spec.plan.head_room))
    gap = max(0, memory.known_bytes - available)
    return {
        "requiredMemory": format_bytes(memory.known_bytes),
        "availableMemory": format_bytes(available),
        "memoryExceeded": not case.feasible,
        "requiredBytes": memory.known_bytes,
        "availableBytes": available,
        "memoryGap": format_bytes(gap),
        "memoryGapBytes": gap,
        "breakdown": _breakdown(case),
        "activationCheckpointing": {
            "enabled": layout.recompute != "none",
            "mode": layout.recompute,
            "everyBlocks": layout.recompute_every,
        },
        "zero": {"stage": _STAGES[layout.sharding], "over": layout.shard_degree},
        "cpuOffloading": {"enabled": layout.offload != "none", "what": moved},
        "efficientAttention": "scaled_dot_product_attention: the scores are never written out "
        "where a flash kernel runs",
        "aggressiveOptimizations": [
            *(_tried(way, gap) for way in ways_of(case.refused)),
            *(
                {
                    "name": each.change,
                    "saves": format_bytes(each.saves_bytes),
                    "savesBytes": each.saves_bytes,
                    "setting": each.field,
                    "costs": each.costs,
                }
                for each in savings(plan, case.job, available)
            ),
        ],
        "finalMemoryEstimate": format_bytes(memory.known_bytes)
        + ("" if memory.total_bytes is not None else " and unknown activations"),
        "finalMemoryEstimateBytes": memory.total_bytes,
    }


def _tried(way: str, gap: int) -> dict[str, Any]:
    """A change that the planner tried, with which the job fits."""
    setting, *told = re.split(r": |, (?=which )", way, maxsplit=1)
    return {
        "name": way,
        "saves": f"the whole gap of {format_bytes(gap)}, as tried by the planner",
        "savesBytes": gap,
        "setting": setting,
        "costs": f"another layout: {told[0]}" if told else "what the change itself takes",
    }


def _breakdown(case: Case) -> dict[str, Any]:
    parts = case.plan.estimate.memory.parts
    sums = {word: sum(parts.get(name) or 0 for name in names) for word, names in _BREAKDOWN.items()}
    rest = case.plan.estimate.memory.known_bytes - sum(sums.values())
    return {
        "params": sums["params"],
        "activations": None if parts.get("activations") is None else sums["activations"],
        "gradients": sums["gradients"],
        "optimizer": sums["optimizer"],
        "buffers": rest,
        "overhead": sums["overhead"],
    }
