"""A plan as the coordinator's training plan, in its twelve sections, true for the plan's target.

The sections and their keys are the contract's; where it asks for what does not exist (a flag of
`mlx.launch`, a message of NCCL), the key holds what does. docs/reference/contracts.md lists each
difference. Targets: CUDA (and every other accelerator with NCCL or gloo) through torchrun, and
Macs through MLX.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.check.preflight.layers import LAYERS
from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.operate import (
    checkpoint_storage,
    health_checks,
    launch_command,
    preflight_command,
    recovery,
)
from paceline.contracts.reading.coordinator import COPIES_COMPRESSED
from paceline.contracts.stated import compare_stated
from paceline.contracts.watched import watched
from paceline.job import Job
from paceline.plan.advice.learning_rate import scale_learning_rate
from paceline.plan.decision import Plan
from paceline.plan.outlook import Outlook
from paceline.render.fabric import decide_network
from paceline.render.mlx import is_mlx, runs_mlx
from paceline.units import counted, format_bytes, format_count, significant

VERSION = "2.0.0"
CHUNK_SAMPLES = 50_000
"""From this many samples on, the contract trains in chunks that can be resumed one by one; none is
larger, unless one step is."""


_NOTHING_MEASURED = "nothing is measured before `pre_flight_checklist.run`"
_NO_STEP_TIME = "the time of a step is not known: `paceline catalog` says which rate is missing"
_ONE_NODE = "one node: there is none to send to, and none that differs"

_NULLS = {
    "batch_configuration.warmup_epochs": "a job counts its warm-up in steps: warmup_steps",
    "distributed_config.mlx_launch_command": "MLX is not the target's library: launch_command",
    "rdma_config.network_reason": "the network is the job's own, or there is one node",
    "rdma_config.expected_speedup": "no RDMA is planned, or nothing says what TCP would take",
    "checkpoint_strategy.best_frequency": _NO_STEP_TIME,
    "checkpoint_strategy.expected_useful_share": _NO_STEP_TIME,
    "performance_targets.throughput": _NO_STEP_TIME,
    "performance_targets.tokens_per_s": f"{_NO_STEP_TIME}, or a sample is no row of tokens",
    "performance_targets.gpu_utilization": f"{_NO_STEP_TIME}, or the accelerator's peak is not",
    "performance_targets.checkpoint_overhead": _NO_STEP_TIME,
    "pre_rdma_sync.dry_run": _ONE_NODE,
    "pre_rdma_sync.command": _ONE_NODE,
    "pre_rdma_sync.verify": _ONE_NODE,
    "hardware_calibration.command": "preflight measures with PyTorch; on Macs it measures no rate",
    "hardware_calibration.result": "preflight measures with PyTorch; on Macs it measures no rate",
    "hardware_calibration.measured": _NOTHING_MEASURED,
    "worker_consistency.byzantine_detection": "every rank must be equal: `reason` beside it",
}
"""Field -> why it may be null."""


def training_plan(plan: Plan, job: Job, view: Outlook, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The plan in the coordinator's words; where a training plan asked for it, `stated` has what it
    stated and the answer has otherwise."""
    answer = {
        "version": VERSION,
        "strategy": _strategy(plan),
        "batch_configuration": _batch(plan, job),
        "distributed_config": _distributed(plan),
        "rdma_config": _rdma(plan),
        "checkpoint_strategy": _checkpoints(plan, job, view),
        "performance_targets": _targets(plan, view),
        "verification_steps": _verification(plan),
        "pre_rdma_sync": _sync(plan, job),
        "hardware_calibration": _calibration(plan, job),
        "worker_consistency": _consistency(plan),
        "coordinator_chunking": _chunking(plan, job),
        "pre_flight_checklist": _preflight(plan, job),
    }
    nulls = _NULLS | {"pre_flight_checklist.alerts": watched(plan, job).why_none}
    found = with_null_reasons(answer, nulls, key="null_reasons")
    differing = [asdict(each) for each in compare_stated(stated, answer, job)]
    return found | ({"stated": differing} if stated else {})


def _strategy(plan: Plan) -> dict[str, Any]:
    cluster = plan.cluster
    how = "MLX" if runs_mlx(plan) else "PyTorch"
    fabric = f", {plan.cluster.network_link} between nodes" if plan.cluster.network_link else ""
    return {
        "approach": f"{how}: {plan.layout_name} on {cluster.name}{fabric}",
        "total_gpus": cluster.num_ranks,
        "nodes": cluster.num_nodes,
        "gpus_per_node": cluster.ranks_per_node,
    }


def _batch(plan: Plan, job: Job) -> dict[str, Any]:
    layout, train = plan.layout, job.spec.train
    rate = scale_learning_rate(
        train.learning_rate,
        base_batch=train.global_batch,
        batch=layout.global_batch,
        optimizer=train.optimizer,
    )
    return {
        "per_gpu_batch_size": layout.micro_batch,
        "total_batch_size": layout.global_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "data_parallel_size": layout.data,
        "learning_rate": rate.learning_rate,
        "learning_rate_rule": rate.rule,
        "base_learning_rate": train.learning_rate,
        "base_batch_size": train.global_batch,
        "warmup_epochs": None,
        "warmup_steps": train.warmup_steps,
    }


def _distributed(plan: Plan) -> dict[str, Any]:
    if runs_mlx(plan):
        sync = (
            "mlx.nn.average_gradients(grads)"
            if plan.layout.sharding == "none"
            else "mlx.nn.fully_shard(model)"
        )
        return {
            "mlx_launch_command": launch_command(plan),
            "launch_command": launch_command(plan),
            "gradient_sync": sync,
            "unified_memory": True,
        }
    sync = {
        "none": "DistributedDataParallel: all-reduce in float32, overlapped with the backward pass",
        "zero1": "all-reduce in float32, optimizer state sharded",
        "zero2": "fully_shard(reshard_after_forward=False): reduce-scatter in float32",
        "full": "fully_shard: reduce-scatter in float32",
        "hybrid": "fully_shard on a 2-D mesh: reduce-scatter inside, all-reduce between",
    }[plan.layout.sharding]
    return {
        "mlx_launch_command": None,
        "launch_command": launch_command(plan),
        "gradient_sync": sync,
        "unified_memory": False,
    }


def _rdma(plan: Plan) -> dict[str, Any]:
    link = plan.cluster.network_link
    reasons = [each.reason for each in plan.decisions if each.field == "cluster.network"]
    return {
        "enabled": plan.cluster.uses_rdma,
        "platform": "macOS 26.2 or newer" if is_mlx(plan) else "Linux",
        "network": link or "none: one node",
        "network_reason": reasons[0] if reasons else None,
        "expected_speedup": _speedup(plan),
        "env_vars": {},
        "env_vars_reason": (
            "--backend chooses JACCL; MLX_METAL_FAST_SYNCH can deadlock and stays unset"
            if runs_mlx(plan)
            else "NCCL finds InfiniBand and GPUDirect itself: NCCL_IB_DISABLE only switches off, "
            "and a level, a buffer size or an algorithm fixed by hand is usually slower"
        ),
    }


def _speedup(plan: Plan) -> str | None:
    """How many times as long the plan's step takes over TCP, computed from what the step sends."""
    found = decide_network(plan)
    if found.choice != "rdma" or not found.others:
        return None
    times = ", ".join(
        f"{significant(each.times_as_long, 2)}x against {each.link}" for each in found.others
    )
    return f"{times} (estimated from the step's own messages)"


def _checkpoints(plan: Plan, job: Job, view: Outlook) -> dict[str, Any]:
    good = view.goodput
    best = view.checkpoints
    own = not runs_mlx(plan)
    return {
        "approach": (
            "sharded, copied to the host and written in the background"
            if own
            else "rank 0 writes a file of the whole state while the others wait"
        )
        + f"; on a failure {recovery(plan, job.spec)}",
        "async": own,
        "compression": _compression(plan, job),
        "storage": checkpoint_storage(plan, job),
        "frequency": f"every_{plan.checkpoint_every}_steps",
        "retention": f"last_{job.spec.checkpoint.keep_last}_checkpoints",
        "expected_recovery_time": (
            f"{view.restart_s:.0f}s for {counted(plan.cluster.num_ranks, 'rank')} (estimated: "
            f"{format_bytes(plan.estimate.num_checkpoint_bytes)} read at "
            f"{format_bytes(view.assumptions.storage_bytes_per_s)}/s a node, a guess)"
        ),
        "best_frequency": None if best is None else f"every_{best.every_steps}_steps",
        "expected_useful_share": None if good is None else good.useful,
    }


def _compression(plan: Plan, job: Job) -> str:
    keep = job.spec.checkpoint
    if keep.copy_to is None or keep.compress == "never" or plan.engine != "paceline":
        return "none"
    return COPIES_COMPRESSED if keep.compress == "auto" else "none; copies always"


def _targets(plan: Plan, view: Outlook) -> dict[str, Any]:
    price, layout = plan.estimate, plan.layout
    samples = None if price.step_s is None else layout.global_batch / price.step_s
    tokens = price.tokens_per_s
    mfu = getattr(price, "mfu", None)
    overhead = None if view.goodput is None else view.goodput.terms["saving"]
    return {
        "throughput": None if samples is None else f"{samples:.4g} samples/sec",
        "tokens_per_s": None if tokens is None else f"{format_count(tokens)} tokens/sec",
        "gpu_utilization": None if mfu is None else f"{mfu:.0%} of peak FLOP/s (MFU, estimated)",
        "checkpoint_overhead": None if overhead is None else f"{overhead:.2%} (estimated)",
    }


def _verification(plan: Plan) -> list[str]:
    steps = [
        f"{check.name}: `{check.command}` prints {check.expect}" for check in health_checks(plan)
    ]
    if runs_mlx(plan):
        steps += [
            "Print mx.get_active_memory() and mx.get_peak_memory() after the first step",
            f"Print mx.distributed.init().size() on every rank: {plan.cluster.num_ranks}",
        ]
    elif plan.cluster.backend == "nccl":
        if plan.cluster.num_nodes > 1:
            wanted = "IB" if plan.cluster.uses_rdma else "Socket"
            steps.append(
                f"Run once with NCCL_DEBUG=INFO: `grep 'Using network {wanted}'` finds every rank"
                + ("; `via NET/IB` channels end in /GDRDMA" if plan.cluster.uses_rdma else "")
            )
        steps.append(
            "torch.cuda.max_memory_reserved() after the first step is below the estimate "
            f"of {format_bytes(plan.estimate.memory.known_bytes)} plus 10 %"
        )
    steps.append(
        "Kill one rank at a step of your choice: "
        + (
            "launch.sh ends with an error, and started again it resumes from the newest checkpoint"
            if runs_mlx(plan)
            else "training resumes with the same losses"
        )
    )
    return steps


def _sync(plan: Plan, job: Job) -> dict[str, Any]:
    several = plan.cluster.num_nodes > 1
    return {
        "enabled": several,
        "validate_checksums": True,
        "block_on_failure": True,
        "dry_run": f"paceline sync {job.words} --dry-run" if several else None,
        "command": f"paceline sync {job.words}" if several else None,
        "verify": preflight_command(plan, job) if several else None,
    }


def _calibration(plan: Plan, job: Job) -> dict[str, Any]:
    share = 1 / plan.cluster.num_nodes
    return {
        "enabled": plan.cluster.num_nodes > 1 and not runs_mlx(plan),
        "command": None if runs_mlx(plan) else preflight_command(plan, job),
        "result": None if runs_mlx(plan) else "`rates`: each node's FLOP/s and share of all",
        "reason": "shares are equal: a synchronous step is as slow as its slowest rank, and uneven "
        "shares need uneven batches and weighted gradients; a node far below its share is replaced",
        "nodes": plan.cluster.num_nodes,
        "workload_share_per_node": share,
        "measured": None,
    }


_COMPARED = {"nccl": ("torch", "NCCL", "driver"), "mlx": ("mlx", "macOS")}
"""Backend -> what preflight compares between its nodes beside what it compares between all."""


def _consistency(plan: Plan) -> dict[str, Any]:
    own = _COMPARED.get(plan.cluster.backend, ("torch",))
    return {
        "enabled": plan.cluster.num_nodes > 1,
        "threshold": 1.0,
        "compare": ["code", "data", "environment variables", "python packages", *own],
        # shasum comes with Perl, on macOS and Linux alike; sha256sum is not on every Mac.
        "command": "find . -name '*.py' -type f -print0 | LC_ALL=C sort -z "
        "| xargs -0 shasum -a 256 | shasum -a 256",
        "on_mismatch": "block",
        "byzantine_detection": None,
        "reason": "one stale rank spoils every gradient, so all hashes must be equal; Krum is for "
        "gradients and says nothing about hashes",
    }


def _chunking(plan: Plan, job: Job) -> dict[str, Any]:
    batch, steps = plan.layout.global_batch, job.spec.train.steps
    samples = steps * batch
    if samples < CHUNK_SAMPLES:
        return {
            "enabled": False,
            "chunk_size": CHUNK_SAMPLES,
            "samples": samples,
            "num_chunks": 1,
            "reason": f"{samples:,} samples are fewer than {CHUNK_SAMPLES:,}: one chunk",
        }
    length = max(1, CHUNK_SAMPLES // batch)
    larger = "" if batch <= CHUNK_SAMPLES else f", more than {CHUNK_SAMPLES:,}: no chunk is smaller"
    return {
        "enabled": True,
        "chunk_size": max(CHUNK_SAMPLES, batch),
        "samples": samples,
        "num_chunks": -(-steps // length),
        "steps_per_chunk": length,
        "setting": f"checkpoint.every={length}",
        "is_saved_after_each": length % plan.checkpoint_every == 0,
        "reason": f"a chunk is {counted(length, 'step')} of {batch:,} samples{larger}, in the "
        "order of training; with the setting each ends with a checkpoint, so that a run that "
        "fails repeats its own chunk at most, with the same numbers",
    }


def _preflight(plan: Plan, job: Job) -> dict[str, Any]:
    command, rules = preflight_command(plan, job), watched(plan, job).rules
    by_hand: dict[str, list[dict[str, str]]] = {}
    for check in health_checks(plan):
        row = {"name": check.name, "command": check.command, "expect": check.expect}
        by_hand.setdefault(check.layer, []).append(row | {"fix_command": check.fix})
    checks = [
        {
            "name": name,
            "status": "not run",
            "command": command,
            "expect": f"the layer `{name}` with status pass",
            "fix_command": layer.fix.replace("JOB", job.words),
            "by_hand": by_hand.get(name, []),
        }
        for name, layer in LAYERS.items()
    ]
    return {
        "overall": "not run",
        "run": command,
        "blocks_launch": True,
        "checks": checks,
        "alerts": None if rules is None else [rule.condition for rule in rules],
    }
