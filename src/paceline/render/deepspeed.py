"""DeepSpeed: `ds_config.json` with ZeRO, offload and a pipeline, a launch script, a hostfile, an
example program.

Leaves out: tensor and sequence parallelism of DeepSpeed, which rewrite the program's model and
cannot be said in a configuration; `deepspeed_pipeline.py` has what a pipeline lacks.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline.job import Job
from paceline.job.places import SshSpec
from paceline.parallel.abilities import abilities_of
from paceline.plan import Plan
from paceline.render.carried import OF_TORCH
from paceline.render.deepspeed_pipeline import pipeline_gaps, pipeline_section
from paceline.render.device import accelerator_refusals
from paceline.render.engine import Files, Gap
from paceline.render.environment import (
    PORT,
    environment,
    export_lines,
    meeting_lines,
    torchrun_options,
)
from paceline.render.example import example, example_gaps, node_lines, runs_example
from paceline.render.hosts import host_names
from paceline.render.shared_gaps import precision_gaps, split_gaps
from paceline.render.shell import command, script
from paceline.render.text import header, releases, to_json

CONFIG = "ds_config.json"
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "full": 3}
"""Sharding -> the stage of ZeRO."""

_LEAST_BUCKET = 25_000_000
"""Elements of a bucket at the least: 50 MB in 16 bits, twice DDP's 25 MiB, and a twentieth of
DeepSpeed's own 5e8. A guess between a message's latency and the memory."""

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
_NOTHING_NEAR = {
    "tensor": "its AutoTP rewrites models of Hugging Face that it knows; a configuration alone "
    "does not split one",
    "pipeline": "the program has to give its model as layers to PipelineModule, and to call "
    "train_batch on what that becomes",
    "context": "Ulysses replaces the attention of a model of Hugging Face inside the program",
    "expert": "the program has to build its layers from deepspeed.moe.layer.MoE",
}

_PRECISIONS = {
    "fp8": (
        "DeepSpeed has no fp8 of its own: the model's layers must be TransformerEngine's",
        None,
    ),
    "tf32": (
        "it is a setting of torch, not of DeepSpeed",
        'fp32, and the program calls torch.set_float32_matmul_precision("high")',
    ),
}
"""Precision that it lacks -> why, and what comes nearest."""

CARRIES = OF_TORCH | {"train.optimizer", "ssh.hosts", "ssh.port"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`ds_config.json`, `launch.sh` for every node, and the example program; with `ssh.hosts` also
    a hostfile and a script that starts all of them from one."""
    files = {CONFIG: to_json(config(plan, job)), "launch.sh": _launch(plan, job)}
    if plan.cluster.num_nodes > 1 and job.spec.ssh.hosts:
        files |= {
            "hostfile": _hostfile(plan, job),
            "launch-hosts.sh": _launch_hosts(plan, job),
            ".deepspeed_env": "".join(f"{v.name}={v.value}\n" for v in environment(plan)),
        }
    if plan.layout.pipeline > 1:
        scripts = ("train_deepspeed_pipeline.py", "lm.py", "train_deepspeed.py")
        return files | example(plan, job, *scripts)
    return files | example(plan, job, "train_deepspeed.py", "lm.py")


def config(plan: Plan, job: Job, *, program_has_optimizer: bool = False) -> dict[str, Any]:
    """`ds_config.json` as values.

    Args:
        plan: Batch, sharding, offload and precision.
        job: Optimizer and clipping.
        program_has_optimizer: As with Accelerate, which takes it from the program alone.
    """
    layout = plan.layout
    found: dict[str, Any] = {
        # The first is the product of the others and of the data ranks: deepspeed/runtime/config.py,
        # `_batch_assertion`.
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
    }
    found["gradient_clipping"] = job.spec.train.clip_norm or 0.0
    if not program_has_optimizer:
        found["optimizer"] = _optimizer(plan, job)
    if job.spec.train.optimizer != "adamw":
        found["zero_allow_untested_optimizer"] = True  # else ZeRO takes Adam alone
    found |= _precision(plan)
    found["zero_optimization"] = _zero(plan, job)
    if plan.layout.pipeline > 1:
        found["pipeline"] = pipeline_section(plan)
    if plan.layout.recompute == "full":
        found["activation_checkpointing"] = _checkpointing(plan)
    return found


def _checkpointing(plan: Plan) -> dict[str, Any]:
    """How DeepSpeed's own checkpointing is set up. The section starts none: the program calls
    `deepspeed.checkpointing.checkpoint` (`configure` of 0.19,
    deepspeed/runtime/activation_checkpointing/checkpointing.py), as the example programs do."""
    blocks, every = plan.profile.num_blocks, plan.layout.recompute_every
    return {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": -(-blocks // (plan.layout.pipeline * every)),
    }


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What neither `ds_config.json` nor the example program says."""
    return [
        *(gap for gap in config_gaps(plan, job) if gap.where != "layout.pipeline"),
        *pipeline_gaps(plan),
        *_schedule_gaps(job),
        *_host_gaps(plan, job),
        *_example(plan, job),
    ]


def config_gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """What `ds_config.json` lacks, whoever starts the ranks."""
    layout = plan.layout
    yield from accelerator_refusals(
        plan,
        uses=abilities_of("deepspeed").backends,
        why="these files are for GPUs over NCCL and CPUs over gloo: no other was tried",
    )
    yield from split_gaps(plan, _NOTHING_NEAR)
    if layout.sharding == "hybrid":
        yield Gap(
            what=f"hybrid sharding in groups of {layout.shard_degree}",
            where="layout.sharding",
            why="ZeRO++ keeps a second copy of the parameters in each group and shards the "
            "rest over all ranks, another layout; MiCS needs its own constructor",
            nearest=None,
            fix="layout.sharding: full",
        )
    yield from _offload_gaps(plan)
    if layout.recompute == "full" and layout.pipeline == 1 and not runs_example(plan, job):
        yield Gap(
            what="full recompute in your own program",
            where="layout.recompute",
            why="the section activation_checkpointing sets it up and starts none",
            nearest="your own TRAIN_SCRIPT calls deepspeed.checkpointing.checkpoint for each "
            "block, or model.gradient_checkpointing_enable() of Hugging Face",
        )
    if layout.recompute == "selective":
        yield Gap(
            what="selective recompute",
            where="layout.recompute",
            why="DeepSpeed's checkpointing takes whole functions of the program",
            nearest="nothing is recomputed, which holds more and computes less, unless your "
            "own program does it",
            fix="layout.recompute: full",
        )
    yield from precision_gaps(plan, _PRECISIONS)
    if plan.precision in ("bf16", "fp16") and plan.engine != "deepspeed":
        kept = "float32" if accumulates_wide(plan) else plan.precision
        yield Gap(
            what=f"parameters and gradients on the wire in float32 with {plan.precision}",
            where="train.precision",
            why="DeepSpeed computes from parameters in the narrow type and sends gradients "
            "in it" + ("" if accumulates_wide(plan) else "; stage 0 (0.19) also accumulates in it"),
            nearest=f"float32 masters in the optimizer, gradients accumulated in {kept}",
            fix="" if accumulates_wide(plan) else "layout.sharding: zero1",
        )


def _offload_gaps(plan: Plan) -> Iterator[Gap]:
    layout = plan.layout
    if layout.offload_parameters and STAGES.get(layout.sharding, 3) in (1, 2):
        yield Gap(
            what=f"parameters on {layout.offload} with sharding {layout.sharding}",
            where="layout.offload_parameters",
            why="DeepSpeed offloads parameters from ZeRO stage 3 on",
            nearest="optimizer state alone is offloaded: more memory on the accelerator",
            fix="layout.sharding: full",
        )
    if layout.offload == "none" or layout.sharding != "none":
        return
    yield Gap(
        what=f"offload {layout.offload} with sharding none",
        where="layout.offload",
        why="DeepSpeed offloads what ZeRO shares, from stage 1 on",
        nearest=None,
        fix="layout.sharding: zero1",
    )


def _schedule_gaps(job: Job) -> Iterator[Gap]:
    train = job.spec.train
    if train.schedule == "constant" and train.warmup_steps == 0:
        return
    what = f"the {train.schedule} schedule"
    if train.warmup_steps:
        what += f" after {train.warmup_steps} steps of warm-up"
    yield Gap(
        what=f"{what} in {CONFIG}",
        where="train.schedule",
        why="DeepSpeed's own schedulers begin with two steps at a rate of zero, and its linear "
        "one ends at zero (deepspeed/runtime/lr_schedules.py, 0.19.8)",
        nearest="the example program sets the rate of every step; your own passes lr_scheduler "
        "to deepspeed.initialize",
    )


def _host_gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    ssh, nodes = job.spec.ssh, plan.cluster.num_nodes
    if nodes == 1:
        return
    if ssh.hosts:
        yield from _ssh_gaps(ssh, nodes)
        return
    yield Gap(
        what="the hostfile",
        where="ssh.hosts",
        why="the job names no hosts",
        nearest="launch.sh is started on every node, by Slurm or by hand",
        fix="ssh.hosts: [node-a, node-b]",
    )


def _ssh_gaps(ssh: SshSpec, nodes: int) -> Iterator[Gap]:
    """Gaps of `launch-hosts.sh`: DeepSpeed's launcher (0.19) takes hosts and a port."""
    if len(ssh.hosts) > nodes:
        yield Gap(
            what=f"spare hosts: {', '.join(ssh.hosts[nodes:])}",
            where="ssh.hosts",
            why="DeepSpeed's launcher (0.19) starts every host of its file and replaces none",
            nearest=f"the hostfile names the first {nodes}",
            fix="`paceline run --on ssh`, which puts a spare in a lost host's place",
        )
    for name, value, word in (
        ("identity", ssh.identity, "IdentityFile"),
        ("config", ssh.config, "Include"),
    ):
        if value is not None:
            yield Gap(
                what=f"ssh.{name}: {value}",
                where=f"ssh.{name}",
                why="DeepSpeed's launcher (0.19) has no option for it",
                nearest=f"what ssh takes itself: name it in ~/.ssh/config, with {word}",
            )
    if ssh.python is not None:
        yield Gap(
            what=f"ssh.python: {ssh.python}",
            where="ssh.python",
            why="DeepSpeed's launcher (0.19) starts the Python that it runs in itself, by its path",
            nearest="the same path on every host",
        )


def _example(plan: Plan, job: Job) -> list[Gap]:
    # A bucket is none of the program's: no file sets it, however gradients are reduced.
    found = [gap for gap in example_gaps(plan, job) if gap.where != "train.bucket"]
    field = "train.optimizer"
    if job.spec.train.optimizer in OPTIMIZERS:  # the program takes what ds_config.json says
        return [gap for gap in found if gap.where != field]
    why = "DeepSpeed 0.19 has no such optimizer for its sharded state"
    return [replace(g, why=why, nearest=None) if g.where == field else g for g in found]


def _optimizer(plan: Plan, job: Job) -> dict[str, Any]:
    train = job.spec.train
    if train.optimizer == "sgd":
        return {"type": "SGD", "params": {"lr": train.learning_rate, "momentum": 0.9}}
    values: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": list(train.betas),
        "eps": train.eps,
        "weight_decay": train.weight_decay,
    }
    if plan.layout.offload == "none":
        values["torch_adam"] = True  # as fast with foreach, and nothing is compiled at the start
    return {"type": OPTIMIZERS[train.optimizer], "params": values}


def accumulates_wide(plan: Plan) -> bool:
    """Whether narrow gradients are accumulated in float32.

    Without ZeRO, DeepSpeed 0.19.8 ends with NotImplementedError when it is asked to
    (deepspeed/runtime/engine.py, `_do_optimizer_sanity_check`).
    """
    return plan.precision in ("bf16", "fp16") and stage_of(plan) > 0


def stage_of(plan: Plan) -> int:
    """The stage of ZeRO; of a pipeline 1 at least.

    Without ZeRO, DeepSpeed 0.19.8 counts only the first stage's gradients in the norm that it clips
    by (deepspeed/runtime/utils.py, `clip_grad_norm_`: the others count where they are marked as
    split over tensors), and in bf16 it ends (deepspeed/runtime/pipe/engine.py,
    `_bf16_reduce_grads`). A run of two ranks was off by 4e-4 at its third step so.
    """
    return max(1 if plan.layout.pipeline > 1 else 0, STAGES.get(plan.layout.sharding, 3))


def _precision(plan: Plan) -> dict[str, Any]:
    wide = {"data_types": {"grad_accum_dtype": "fp32"}} if accumulates_wide(plan) else {}
    if plan.precision == "bf16":
        return {"bf16": {"enabled": True}} | wide
    if plan.precision == "fp16":
        scaler = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
        return {"fp16": scaler} | wide
    return {}


def _zero(plan: Plan, job: Job) -> dict[str, Any]:
    layout = plan.layout
    found: dict[str, Any] = {"stage": stage_of(plan)}
    if found["stage"] == 0:
        return found
    found |= {"overlap_comm": True, "contiguous_gradients": True}
    # One matrix at a time, as transformers/integrations/deepspeed.py fills "auto"; of a narrow
    # model several, or each message would take its latency.
    width = max((block.hidden for block in plan.profile.blocks), default=0)
    found["reduce_bucket_size"] = max(width * width, _LEAST_BUCKET)
    if found["stage"] == 3:
        found["stage3_prefetch_bucket_size"] = int(0.9 * found["reduce_bucket_size"])
        if width:
            found["stage3_param_persistence_threshold"] = 10 * width
    else:
        found["allgather_bucket_size"] = max(width * width, _LEAST_BUCKET)
    if layout.offload != "none":
        where: dict[str, Any] = {"device": layout.offload, "pin_memory": True}
        if layout.offload == "nvme":
            where["nvme_path"] = _nvme_path(job)
        found["offload_optimizer"] = where
        if layout.offload_parameters and found["stage"] == 3:
            found["offload_param"] = where | _buffers(plan)
    return found


def _buffers(plan: Plan) -> dict[str, int]:
    """Elements of a buffer for parameters on a disk: a rank's part of the largest matrix fits
    (deepspeed/runtime/swap_tensor/partitioned_param_swapper.py, 0.19; 1e8 is its default)."""
    if plan.layout.offload != "nvme":
        return {}
    largest = plan.profile.head_inputs * plan.profile.head_outputs
    return {"buffer_size": max(10**8, 2 * largest // plan.layout.shard_degree)}


def _nvme_path(job: Job) -> str:
    path = job.spec.layout.offload_path
    assert path is not None, "the plan refuses nvme without it: H020"
    return path


def _launch(plan: Plan, job: Job) -> str:
    lines = [
        'cd "$(dirname "$0")"',
        *node_lines(plan, job),
        *meeting_lines(plan),
        *export_lines(plan),
        *(["export DS_ACCELERATOR=cpu  # else it looks for a GPU"] if _is_cpu(plan) else []),
        " ".join(["exec torchrun", *torchrun_options(plan), '"${TRAIN_SCRIPT:-train.py}" "$@"']),
    ]
    about = "torchrun starts DeepSpeed's ranks as well as its own launcher does, and needs no ssh."
    return script(header(plan, job, about, *releases(plan, "deepspeed")), *lines)


def _is_cpu(plan: Plan) -> bool:
    return plan.cluster.backend == "gloo"


def _hostfile(plan: Plan, job: Job) -> str:
    slots = plan.cluster.ranks_per_node
    return "".join(f"{host} slots={slots}\n" for host in host_names(plan, job))


def _launch_hosts(plan: Plan, job: Job) -> str:
    head = host_names(plan, job)[0].rpartition("@")[2]
    about = "Run on one host: starts all of `hostfile` over ssh (pdsh), with `.deepspeed_env`."
    port = job.spec.ssh.port
    words = command(
        "deepspeed",
        "--hostfile=hostfile",
        *([] if port is None else [f"--ssh_port={port}"]),
        "--no_local_rank",
        f"--master_addr={head}",
    )
    return script(
        header(plan, job, about),
        'cd "$(dirname "$0")"',
        f'exec {words} --master_port="${{HEAD_PORT:-{PORT}}}" "${{TRAIN_SCRIPT:-train.py}}" "$@"',
    )
