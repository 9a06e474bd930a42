"""Random jobs for engines that Paceline writes files for, and the layout that those files describe.

`random_job(number)` is the same job on every machine. What the files describe is read here with no
code of Paceline's; `tests/engines/test_random_plans.py` reads them with the engines' own.
"""

import ast
import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from paceline.catalog import load_accelerators
from paceline.catalog.configs import load_published_configs
from paceline.choices import Attention
from paceline.job import Job, parse_job
from paceline.job.engine import ENGINE_NAMES
from paceline.plan import Plan
from paceline.render import Gap

ENGINES = ("deepspeed", "accelerate", "torchtitan", "megatron", "megatron-bridge", "fsdp1")
"""Engines of the catalog that have files."""

RENDERER = {"fsdp1": "accelerate"}
"""Engine -> `--for`, where the two names differ."""

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "sharding": ("none", "zero1", "zero2", "full", "hybrid"),
    "recompute": ("none", "selective", "full"),
    "tensor": (1, 2, 4, 8),
    "pipeline": (1, 2, 4),
    "context": (1, 2),
    "offload": ("none", "cpu", "nvme"),
    "micro_batch": (1, 2),
}


def random_job(number: int, engine: str | None = None) -> Job:
    """One of endlessly many jobs: three in four leave the whole layout open, one in three names a
    release, a kernel of attention or both.

    Raises:
        JobError: The release is none that the engine can be planned for.
    """
    text = yaml.safe_dump(random_spec(number, engine))
    return parse_job(text, source="job.yaml", folder=Path.cwd())


def random_spec(number: int, engine: str | None = None) -> dict[str, Any]:
    """What the job file says."""
    draw = random.Random(number)
    accelerators = [
        name for name, known in load_accelerators().items() if known.backend in ("nccl", "rccl")
    ]
    layout = {}
    if draw.random() < 0.25:
        for name in draw.sample(sorted(_FIXED), draw.choice((1, 1, 2))):
            layout[name] = draw.choice(_FIXED[name])
    spec: dict[str, Any] = {
        "name": f"random-{number}",
        "engine": engine or draw.choice(ENGINES),
        "model": _model(draw),
        "data": {"path": "data", "seq_len": draw.choice((512, 1024, 2048, 4096, 8192, 3000))},
        "cluster": {
            "accelerator": draw.choice(accelerators),
            "nodes": draw.choice((1, 1, 1, 2, 2, 3, 4, 8, 16, 32)),
            "per_node": draw.choice((1, 2, 4, 8, 8, 8)),
        },
        "train": {
            "global_batch": draw.choice((16, 32, 64, 96, 128, 256, 512, 1024)),
            "steps": 1000,
            "optimizer": draw.choice(("adamw",) * 9 + ("sgd",)),
        },
        "layout": layout,
    }
    more = random.Random(f"more of {number}")
    if more.random() < 0.2:
        spec["engine_version"] = more.choice(releases(str(spec["engine"])))
    if more.random() < 0.2:
        spec["train"] = {**spec["train"], "attention": more.choice(get_args(Attention))}
    return spec


def releases(engine: str) -> list[str]:
    """Those that were read, a newer patch, an older and a newer one."""
    first, last = ENGINE_NAMES[engine].read or ("1.0.0", "1.0.0")
    major, minor, patch = map(int, last.split("."))
    series = f"{major}.{minor}"
    newer = [f"{series}.{patch + 1}", f"{major}.{minor + 1}.0"]
    return ["0.0.1", first, last, last, series, ENGINE_NAMES[engine].planned or last, *newer]


def _model(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"preset": draw.choice(sorted(load_published_configs()))}
    heads = draw.choice((8, 12, 16, 20, 32, 40, 64))
    decoder = {
        "layers": draw.choice((2, 6, 12, 18, 24, 30, 32, 40, 61, 80)),
        "hidden": heads * draw.choice((64, 128)),
        "heads": heads,
        "kv_heads": heads // draw.choice((1, 1, 2, 4)),
        "vocab": draw.choice((256, 32000, 50304, 128256)),
        "tied_embeddings": draw.random() < 0.3,
    }
    return {"decoder": decoder}


def planned_words(plan: Plan, words: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan has of those words that the files have."""
    layout = plan.layout
    shard = layout.shard_degree if layout.sharding in ("full", "hybrid", "zero2") else 1
    found = {name: getattr(layout, name) for name in words if hasattr(layout, name)}
    found["ranks"] = plan.cluster.num_ranks
    if "shard" in words:
        found["shard"] = shard
    if "schedule" in words and layout.pipeline == 1:
        found["schedule"] = words["schedule"]
    if layout.recompute != "full":
        found.pop("recompute_every", None)
    if layout.data * layout.context == 1:  # nobody to share with: every way to shard is the same
        found.pop("sharding", None)
    return {name: found[name] for name in words if name in found}


def unsaid(gaps: Iterable[Gap]) -> list[Gap]:
    """Gaps by which the files describe another run than the plan. What only a program of the
    person's own can do is that program's; and torchtitan's context ranks, which a job has to ask
    for, gather keys and values."""
    return [
        gap
        for gap in gaps
        if gap.where.startswith(("layout.", "train.precision"))
        and gap.where != "layout.context"
        and "TRAIN_SCRIPT" not in (gap.nearest or "")
    ]


def layout_words(engine: str, files: Mapping[str, str]) -> dict[str, Any]:
    """The layout that an engine's files describe, in the words of `Layout`."""
    readers = {
        "deepspeed": _deepspeed,
        "accelerate": _accelerate,
        "fsdp1": _accelerate,
        "torchtitan": _torchtitan,
        "megatron": _megatron,
        "megatron-bridge": _bridge,
    }
    return readers[engine](files)


def _started(script: str) -> int:
    """Ranks that a launch script starts on all nodes."""
    nodes = re.search(r"--nnodes=(\d+)", script)
    ranks = re.search(r"--nproc-per-node=(\d+)", script)
    assert ranks is not None, script
    return int(ranks.group(1)) * (int(nodes.group(1)) if nodes else 1)


def _deepspeed(files: Mapping[str, str]) -> dict[str, Any]:
    values = json.loads(files["ds_config.json"])
    zero = values["zero_optimization"]
    pipeline = values.get("pipeline", {}).get("stages", 1)
    ranks = _started(files["launch.sh"])
    micro, several = (
        values["train_micro_batch_size_per_gpu"],
        values["gradient_accumulation_steps"],
    )
    data = ranks // pipeline
    assert values["train_batch_size"] == micro * several * data
    sharding = ("none", "zero1", "zero2", "full")[zero["stage"]]
    again = "activation_checkpointing" in values
    if pipeline > 1:
        again = values["pipeline"]["activation_checkpoint_interval"] > 0
        sharding = "none" if data == 1 else sharding
    moved = zero.get("offload_optimizer", {"device": "none"})["device"]
    return {
        "ranks": ranks,
        "data": data,
        "sharding": sharding,
        "micro_batch": micro,
        "accumulation": several,
        "tensor": 1,
        "context": 1,
        "expert": 1,
        "pipeline": pipeline,
        "schedule": "1f1b",
        "recompute": "full" if again else "none",
        "offload": moved,
        "offload_parameters": "offload_param" in zero,
    }


def _accelerate(files: Mapping[str, str]) -> dict[str, Any]:
    values = yaml.safe_load(files["accelerate.yaml"])
    batch = json.loads(files["train.json"])["batch"]
    found = {
        "ranks": values["num_processes"],
        "micro_batch": batch["micro"],
        "accumulation": batch["accumulation"],
        "pipeline": 1,
        "expert": 1,
    }
    if values["distributed_type"] == "DEEPSPEED":
        with_script = {**files, "launch.sh": f"--nproc-per-node={values['num_processes']}"}
        return _deepspeed(with_script)
    mesh = values.get("parallelism_config", {})

    def size(name: str) -> int:
        return int(mesh.get(f"parallelism_config_{name}_size", 1))

    fsdp = values.get("fsdp_config")
    tensor, context = size("tp"), size("cp")
    found |= {"data": values["num_processes"] // (tensor * context), "tensor": tensor}
    found["context"] = context
    if fsdp is None:
        again = json.loads(files["train.json"])["layout"]["recompute"]
        return found | {"sharding": "none", "recompute": again, "offload": "none"}
    shard = size("dp_shard") * context
    if fsdp["fsdp_version"] == 1:
        sharding = {
            "FULL_SHARD": "full",
            "SHARD_GRAD_OP": "zero2",
            "HYBRID_SHARD": "hybrid",
        }[fsdp["fsdp_sharding_strategy"]]
        shard = found["data"] if sharding != "hybrid" else found["data"] // values["num_machines"]
    else:
        replicas = size("dp_replicate") > 1
        whole = "hybrid" if replicas else "full"
        sharding = whole if fsdp["fsdp_reshard_after_forward"] else "zero2"
    moves = fsdp["fsdp_offload_params"]
    return found | {
        "sharding": sharding,
        "shard": shard,
        "recompute": "full" if fsdp["fsdp_activation_checkpointing"] else "none",
        "recompute_every": 1,
        "offload": "cpu" if moves else "none",
        "offload_parameters": moves,
    }


def _keywords(text: str) -> dict[str, Any]:
    """Every keyword of the calls in a Python file whose value is a constant or a list of them."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg is not None:
            try:
                found[node.arg] = ast.literal_eval(node.value)
            except ValueError:
                found[node.arg] = ast.unparse(node.value)
    return found


def _torchtitan(files: Mapping[str, str]) -> dict[str, Any]:
    words = _keywords(files["paceline_job.py"])
    replicate = words["data_parallel_replicate_degree"]
    shard, context = words["data_parallel_shard_degree"], words["context_parallel_degree"]
    pipeline, tensor = words["pipeline_parallel_degree"], words["tensor_parallel_degree"]
    ranks = _started(files["launch.sh"])
    data = replicate * shard
    assert data * context * pipeline * tensor == ranks
    assert shard * context * tensor % words["expert_parallel_degree"] == 0
    per_rank = words["global_batch_size"] // data
    local = words["local_batch_size"]
    micro = words.get("pipeline_parallel_microbatch_size", local)
    reshards = words["fsdp_reshard_after_forward"] == "always"
    shards = shard * context > 1
    sharding = "none"
    if shards:
        sharding = "zero2" if not reshards else "hybrid" if replicate > 1 else "full"
    parts = words.get("module_fqns_per_model_part", [])
    schedules = {
        "GPipe": "gpipe",
        "1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "InterleavedZeroBubble": "zero-bubble",
        "ZBVZeroBubble": "zero-bubble",
        "DualPipeV": "dualpipe-v",
    }
    schedule = schedules[words.get("pipeline_parallel_schedule", "1F1B")]
    again = {"None": "none", None: "none", "SelectiveAC.Config()": "selective"}
    return {
        "ranks": ranks,
        "data": data,
        "sharding": sharding,
        "shard": shard * context,
        "micro_batch": micro,
        "accumulation": per_rank // micro,
        "tensor": tensor,
        "context": context,
        "expert": words["expert_parallel_degree"],
        "pipeline": pipeline,
        "schedule": schedule,
        "chunks": len(parts) // pipeline if parts and schedule != "dualpipe-v" else 1,
        "recompute": again.get(words["activation_checkpoint"], "full"),
        "recompute_every": 1,
        "offload": "cpu" if words["enable_cpu_offload"] else "none",
        "offload_parameters": words["enable_cpu_offload"],
    }


def _core(words: Mapping[str, Any], ranks: int, shards: bool, moves: bool) -> dict[str, Any]:
    """Megatron Core's fields as a layout."""
    tensor, pipeline = words["tensor_model_parallel_size"], words["pipeline_model_parallel_size"]
    context = words["context_parallel_size"]
    data = ranks // (tensor * pipeline * context)
    parts = words.get("pipeline_model_parallel_layout")
    stages = parts.count("|") + 1 if parts else None
    chunks = stages // pipeline if stages else words.get("virtual_pipeline_model_parallel_size", 1)
    again = words.get("recompute_granularity", "none")
    on_stage = -(-words["num_layers"] // (pipeline * chunks))
    uniform = words.get("recompute_method", "uniform") == "uniform"
    recomputed = on_stage if uniform else words["recompute_num_layers"]  # of a virtual stage
    return {
        "ranks": ranks,
        "data": data,
        "sharding": "zero1" if shards and data * context > 1 else "none",
        "micro_batch": words["micro_batch_size"],
        "accumulation": words["global_batch_size"] // (words["micro_batch_size"] * data),
        "tensor": tensor,
        "sequence_parallel": tensor == 1 or bool(words.get("sequence_parallel")),
        "context": context,
        "context_kind": {"a2a": "ulysses"}.get(words.get("cp_comm_type", "p2p"), "ring"),
        "expert": words["expert_model_parallel_size"],
        "pipeline": pipeline,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "chunks": chunks,
        "recompute": again,
        "recompute_every": round(on_stage / recomputed),
        "offload": "cpu" if moves else "none",
        "offload_parameters": False,
    }


def _megatron(files: Mapping[str, str]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for line in files["arguments.txt"].splitlines():
        if line.startswith("--"):
            flag, *values = line.removeprefix("--").split()
            value = values[0] if values else True
            is_number = isinstance(value, str) and value.lstrip("-").isdigit()
            words[flag.replace("-", "_")] = int(value) if is_number else value
    chunks = words.pop("num_virtual_stages_per_pipeline_rank", 1)
    words["virtual_pipeline_model_parallel_size"] = chunks
    return _core(
        words,
        _started(files["launch.sh"]),
        "use_distributed_optimizer" in words,
        "optimizer_cpu_offload" in words,
    )


def _bridge(files: Mapping[str, str]) -> dict[str, Any]:
    words = _keywords(files["recipe.py"])
    return _core(
        words,
        _started(files["launch.sh"]),
        bool(words["use_distributed_optimizer"]),
        bool(words.get("optimizer_cpu_offload")),
    )
