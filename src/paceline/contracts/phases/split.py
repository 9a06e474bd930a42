"""Phases 3 and 4: how the work and the data are split."""

from typing import Any

from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.phases.case import Case
from paceline.contracts.phases.resources import bottlenecks_of
from paceline.contracts.writing.engineer import sharding_of, strategy_of
from paceline.estimate import exchanged_bytes
from paceline.estimate.schedule import bubble_share
from paceline.plan.case import case_of_plan
from paceline.render.mlx import runs_mlx
from paceline.units import format_bytes, format_count, format_seconds

_LEAST_EFFICIENCY = 0.5
"""Below this share of a step spent on work, a strategy is called not viable: a convention."""

_NUM_ALTERNATIVES = 5
_UNTIMED = "the step's time is unknown"


def choose_strategy(case: Case) -> dict[str, Any]:
    """The plan's layout in the words of the schema, and what lost against it."""
    plan, layout = case.plan, case.plan.layout
    share = working_share(case)
    limits = bottlenecks_of(case)
    axes: dict[str, dict[str, Any]] = {
        "tensor": {"sequenceParallel": layout.sequence_parallel},
        "pipeline": {
            "schedule": layout.schedule,
            "chunks": layout.chunks,
            "microBatches": layout.accumulation,
            "bubbleShare": bubble_share(layout),
        },
        "context": {"kind": layout.context_kind},
        "expert": {},
    }
    found: dict[str, Any] = {
        "recommendedStrategy": strategy_of(layout, case.job.spec.layout),
        "viable": case.feasible and (share is None or share >= _LEAST_EFFICIENCY),
        "expectedScalingEfficiency": "unknown: the step's time is"
        if share is None
        else f"{share:.1%} of a step is compute and optimizer, the rest is "
        "communication and waiting (estimated)",
        "expectedScalingEfficiencyShare": share,
        "shardingStrategy": sharding_of(layout),
        "dataParallelConfig": {
            "degree": layout.data,
            "shardDegree": layout.shard_degree,
            "sharding": layout.sharding,
        },
        **{
            f"{axis}ParallelConfig": {"degree": getattr(layout, axis), **more}
            if getattr(layout, axis) > 1
            else None
            for axis, more in axes.items()
        },
        "hybridConfig": {
            "dp": layout.data,
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "cp": layout.context,
            "ep": layout.expert,
            "totalGPUs": layout.num_ranks,
            "topology": "ranks count tensor first, then context, data, pipeline; "
            f"{plan.cluster.ranks_per_node} to a node",
        },
        "communicationPattern": communication_of(case),
        "frameworkRecommendation": _framework(case),
        "alternatives": _alternatives(case),
        "challenges": [limit["impact"] for limit in limits],
        "mitigations": [limit["mitigation"] for limit in limits],
    }
    reasons = {f"{axis}ParallelConfig": f"layout.{axis} is 1" for axis in axes}
    times = ("expectedScalingEfficiencyShare", "communicationPattern.allReduceBytes")
    unknown = dict.fromkeys(times, _UNTIMED)
    return with_null_reasons(found, reasons | unknown)


def working_share(case: Case) -> float | None:
    """Share of a step that is compute, recomputation left out, and the optimizer."""
    price = case.plan.estimate
    if not price.step_s:
        return None
    return min(
        1.0, sum(price.terms.get(name, 0.0) for name in ("compute", "optimizer")) / price.step_s
    )


def communication_of(case: Case) -> dict[str, Any]:
    """What the fullest rank sends in one step for its data and pipeline groups."""
    plan, layout = case.plan, case.plan.layout
    volume = exchanged_bytes(layout, case_of_plan(plan))
    sends = "none: one stage"
    if layout.pipeline > 1:
        sends = (
            f"{2 * layout.accumulation * layout.chunks} sends a step, activations and their "
            "gradients of one micro-batch each"
        )
    gathers = "" if layout.sharding == "none" else ", parameters gathered"
    return {
        "allReduceVolume": f"unknown: {_UNTIMED}"
        if volume is None
        else f"{format_bytes(volume)} a rank and step with accumulation {layout.accumulation}: "
        f"gradients reduced{gathers} (estimated, as the step's time is)",
        "allReduceBytes": volume,
        "p2pVolume": sends,
        "frequency": "after every micro-batch"
        if layout.reduce_every_micro_batch
        else "once a step, after the last micro-batch",
        "overlappable": layout.data * layout.context > 1,
    }


def _framework(case: Case) -> str:
    if runs_mlx(case.plan):
        return "MLX"
    layout = case.plan.layout
    used = [
        name
        for name, here in (
            ("DistributedDataParallel", layout.sharding == "none" and layout.data > 1),
            ("ZeroRedundancyOptimizer", layout.sharding == "zero1"),
            ("fully_shard (FSDP2)", layout.sharding in ("zero2", "full", "hybrid")),
            ("DTensor tensor parallelism", layout.tensor > 1),
            ("torch.distributed.pipelining", layout.pipeline > 1),
            ("context parallelism", layout.context > 1),
        )
        if here
    ]
    return f"PyTorch: {', '.join(used) if used else 'one process, nothing to wrap'}"


def _alternatives(case: Case) -> list[dict[str, Any]]:
    plan = case.plan
    found: list[dict[str, Any]] = []
    for each in plan.rejected[:_NUM_ALTERNATIVES]:
        memory, least = each.estimate.memory.known_bytes, plan.estimate.memory.known_bytes
        step_s = each.estimate.step_s
        pros = []
        if memory < least:
            pros.append(f"{format_bytes(least - memory)} less a rank")
        if step_s is not None and plan.estimate.step_s and step_s < plan.estimate.step_s:
            pros.append(f"{format_seconds(plan.estimate.step_s - step_s)} shorter a step")
        found.append(
            {
                "strategy": f"{plan.named(each.layout)}, micro-batches of "
                f"{each.layout.micro_batch}, recompute {each.layout.recompute}",
                "pros": pros,
                "cons": [each.reason],
                "stepSeconds": step_s,
                "memoryBytes": memory,
            }
        )
    return found


def distribute_data(case: Case) -> dict[str, Any]:
    """Which rank reads which samples."""
    plan, layout, spec = case.plan, case.plan.layout, case.job.spec
    step_s = plan.estimate.step_s
    rate = None if not step_s else layout.global_batch / step_s
    source = spec.data.corpus or spec.data.path or "the program's own data"
    tokens = plan.estimate.tokens_per_s
    found = {
        "appliesTo": case.applies_to,
        "loadingStrategy": "every rank computes which samples of the step are its own, and reads "
        "only those",
        "shardingConfig": {
            "method": "by slot of the global batch",
            "shardsPerWorker": layout.micro_batch * layout.accumulation,
            "shuffling": f"a seeded permutation of every epoch (seed {spec.train.seed})",
            "samplerType": "a pure function of seed, step and slot: no set_epoch to forget, and no "
            "state to save",
        },
        "workerCount": 0 if spec.program is None else layout.data,
        "prefetch": {
            "factor": 0,
            "buffer": "none: a sample is a slice of memory",
            "pin": plan.cluster.backend == "nccl",
        },
        "caching": "the text is held in each rank's host memory",
        "storage": f"{source}",
        "augmentation": {
            "where": "none",
            "determinism": "generators are seeded by seed, step and rank",
        },
        "imbalanceHandling": f"all {layout.data} data ranks read {layout.micro_batch} samples a "
        "micro-batch, so none waits for a longer one",
        "estimatedThroughput": None
        if rate is None
        else f"{rate:.4g} samples/s"
        + ("" if tokens is None else f", {format_count(tokens)} tokens/s")
        + " are read (estimated)",
        "estimatedSamplesPerSecond": rate,
    }
    rates = ("estimatedThroughput", "estimatedSamplesPerSecond")
    return with_null_reasons(found, dict.fromkeys(rates, _UNTIMED))
