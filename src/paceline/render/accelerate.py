"""Hugging Face Accelerate: its YAML, a launch script for every node, and the example program.

DDP, FSDP2 with Accelerate's ParallelismConfig, or DeepSpeed, whichever has the plan's sharding.
With `engine: fsdp1` it is FSDP1, whose words (`fsdp_sharding_strategy`, `fsdp_use_orig_params`,
`fsdp_backward_prefetch`) mean nothing in FSDP2 and are written for it alone.
"""

from collections.abc import Iterator
from typing import Any, Literal

from paceline.job import Job
from paceline.parallel.abilities import abilities_of
from paceline.plan import Plan
from paceline.render import deepspeed
from paceline.render.carried import OF_DDP
from paceline.render.device import accelerator_refusals
from paceline.render.engine import Files, Gap
from paceline.render.environment import export_lines, meeting_lines
from paceline.render.example import example, example_gaps, node_lines, runs_example
from paceline.render.shared_gaps import split_gaps
from paceline.render.shell import script
from paceline.render.text import header, releases, to_json, to_yaml

CONFIG = "accelerate.yaml"
Way = Literal["MULTI_GPU", "FSDP", "DEEPSPEED"]
"""Accelerate's `distributed_type`."""


def way_of(plan: Plan) -> Way:
    """What Accelerate calls the plan's sharding."""
    layout = plan.layout
    if layout.sharding == "zero1":
        return "DEEPSPEED"
    if layout.sharding == "none":
        return "MULTI_GPU"
    by_fsdp = layout.offload == "cpu" and layout.offload_parameters
    wants_deepspeed = plan.engine == "deepspeed" or (layout.offload != "none" and not by_fsdp)
    return "DEEPSPEED" if wants_deepspeed and layout.sharding != "hybrid" else "FSDP"


CARRIES = OF_DDP
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`accelerate.yaml`, `launch.sh` and the example program; with DeepSpeed also its file."""
    way = way_of(plan)
    about = "Read by `accelerate launch --config_file`; launch.sh says what differs on each node."
    files = {
        CONFIG: to_yaml(header(plan, job, about, *releases(plan, "accelerate")), config(plan, way)),
        "launch.sh": _launch(plan, job, way),
    }
    if way == "DEEPSPEED":
        files[deepspeed.CONFIG] = to_json(deepspeed.config(plan, job, program_has_optimizer=True))
    return files | example(plan, job, "train_accelerate.py", "lm.py")


def config(plan: Plan, way: Way) -> dict[str, Any]:
    """`accelerate.yaml` as values."""
    cluster = plan.cluster
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": way,
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if way == "DEEPSPEED":
        # `mixed_precision` and the stage must not stand here as well: Accelerate refuses both.
        found["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed.CONFIG,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": plan.layout.sharding == "full",
        }
        return found
    found["mixed_precision"] = plan.precision if plan.precision in ("bf16", "fp16", "fp8") else "no"
    is_first = plan.engine == "fsdp1"
    if way == "FSDP":
        found["fsdp_config"] = _fsdp1(plan) if is_first else _fsdp(plan)
    if (way == "FSDP" and not is_first) or plan.layout.tensor > 1:
        found["parallelism_config"] = _parallelism(plan)
    return found


def _fsdp(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.sharding != "zero2",
        # Blocks are what the model names in `_no_split_modules`, as those of Hugging Face do.
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": layout.offload == "cpu",
        "fsdp_activation_checkpointing": layout.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": False,
    }


_STRATEGIES = {"zero2": "SHARD_GRAD_OP", "full": "FULL_SHARD", "hybrid": "HYBRID_SHARD"}
"""Sharding -> FSDP1's `ShardingStrategy`. Hybrid shards in each node and copies between them
(torch/distributed/fsdp/_init_utils.py, `_init_intra_and_inter_node_groups`, 2.13)."""


def _fsdp1(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": _STRATEGIES[layout.sharding],
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,  # else weight decay cannot be of matrices alone
        "fsdp_sync_module_states": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": layout.offload == "cpu",
        "fsdp_activation_checkpointing": layout.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": False,
    }


def _parallelism(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    # The mesh's product is all ranks; parameters are shared over dp_shard x cp.
    shard = layout.shard_degree // layout.context if layout.sharding != "none" else 1
    sizes = {
        "dp_replicate": layout.data // shard,
        "dp_shard": shard,
        "tp": layout.tensor,
        "cp": layout.context,
    }
    found: dict[str, Any] = {f"parallelism_config_{n}_size": size for n, size in sizes.items()}
    if layout.context > 1:
        found["parallelism_config_cp_backend"] = "torch"
        found["parallelism_config_cp_comm_strategy"] = "alltoall"
    return found


def _launch(plan: Plan, job: Job, way: Way) -> str:
    cluster, layout = plan.cluster, plan.layout
    lines = ['cd "$(dirname "$0")"', *node_lines(plan, job)]
    lines += [*meeting_lines(plan, has_name=False), *export_lines(plan)]
    if cluster.backend == "gloo":
        if way == "DEEPSPEED":
            # With ACCELERATE_USE_CPU it would be DDP, without a word (1.15).
            lines.append("export DS_ACCELERATOR=cpu  # else it looks for a GPU")
        else:
            # `use_cpu` and `--cpu` start one process, whatever number was asked for (1.15).
            why = "with MULTI_GPU: --cpu starts one process"
            lines.append(f"export ACCELERATE_USE_CPU=true  # {why}")
    if way != "DEEPSPEED":
        lines.append(
            f"export ACCELERATE_GRADIENT_ACCUMULATION_STEPS={layout.accumulation}"
            "  # for Accelerator(), which reads it"
        )
    words = ["exec accelerate launch", f"--config_file {CONFIG}"]
    if cluster.num_nodes > 1:
        # Set on the node that runs this script: written into an sbatch's own srun line, the head
        # would fill it in for all.
        lines.append('NODE_RANK="${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK, 0 on the head}}"')
        words += [
            '--machine_rank "$NODE_RANK"',
            '--main_process_ip "$HEAD_ADDRESS"',
            '--main_process_port "$HEAD_PORT"',
        ]
    else:
        words.append('--main_process_port "${HEAD_PORT:-0}"')  # 0 is any free one
    if way == "FSDP":
        lines.append(
            "# WRAP_CLASS=MyBlock: for a model without _no_split_modules; else one unit is"
        )
        lines.append("# sharded, which each rank gathers whole.")
        words.append('${WRAP_CLASS:+--fsdp_transformer_layer_cls_to_wrap "$WRAP_CLASS"}')
    words.append('"${TRAIN_SCRIPT:-train.py}" "$@"')
    return script(header(plan, job, *releases(plan, "accelerate")), *lines, " \\\n  ".join(words))


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What Accelerate cannot be told, and what the example program lacks."""
    way = way_of(plan)
    if way == "DEEPSPEED":  # which refuses the same accelerators
        return [*deepspeed.config_gaps(plan, job), *example_gaps(plan, job)]
    is_own = not runs_example(plan, job)
    programs = _of_own_program(plan, way) if is_own else []
    return [*_refused(plan, way), *_nearly(plan, way), *programs, *example_gaps(plan, job)]


def _refused(plan: Plan, way: Way) -> Iterator[Gap]:
    layout = plan.layout
    yield from accelerator_refusals(
        plan,
        uses=abilities_of("accelerate").backends,
        why="these files are for GPUs over NCCL and CPUs over gloo: no other was tried",
    )
    no_pipeline = "Accelerate 1.15 trains without pipelines (its pippy is for inference)"
    no_expert = "its ParallelismConfig has no experts: the model has to bring them"
    yield from split_gaps(plan, {"pipeline": no_pipeline, "expert": no_expert})
    if layout.context > 1 and layout.context_kind == "ulysses":
        why = "FSDP2's context parallelism is the ring; Ulysses is DeepSpeed's, for its models only"
        fix = "layout.context_kind: ring"
        yield Gap(
            what=f"Ulysses over {layout.context}",
            where="layout.context_kind",
            why=why,
            nearest=None,
            fix=fix,
        )
    if layout.sharding == "none" and (
        layout.context > 1 or (layout.tensor > 1 and layout.data > 1)
    ):
        what = f"DDP over {layout.data} with tensor {layout.tensor} and context {layout.context}"
        why = (
            "Accelerate 1.15 reduces gradients over the context ranks, and over data ranks beside "
            "tensor ranks, with sharded parameters only"
        )
        where, fix = "layout.sharding", "layout.sharding: full"
        yield Gap(what=what, where=where, why=why, nearest=None, fix=fix)
    if layout.offload != "none" and way == "MULTI_GPU":
        why, fix = "DDP keeps optimizer state on the accelerator", "layout.sharding: zero2"
        yield Gap(
            what=f"offload {layout.offload}",
            where="layout.offload",
            why=why,
            nearest=None,
            fix=fix,
        )
    if way == "FSDP" and plan.cluster.backend == "gloo":
        why = "Accelerate 1.15 refuses it with a mesh, and without one trains with DDP in silence"
        what, where = "FSDP2 on CPUs", "layout.sharding"
        yield Gap(what=what, where=where, why=why, nearest=None, fix=f"{where}: none")


def _nearly(plan: Plan, way: Way) -> Iterator[Gap]:
    layout = plan.layout
    if layout.offload == "cpu" and way == "FSDP" and not layout.offload_parameters:
        why = "FSDP moves parameters and gradients together with their optimizer state"
        nearest = "fsdp_offload_params: all three are in the host's memory"
        yield Gap(
            what="offload cpu of optimizer state alone",
            where="layout.offload",
            why=why,
            nearest=nearest,
        )
    if layout.tensor > 1:
        why = "Accelerate makes the mesh, the model splits itself: the example program does not"
        nearest = (
            'from_pretrained(..., tp_plan="auto", device_mesh=accelerator.torch_device_mesh) in '
            "your own TRAIN_SCRIPT"
        )
        what, where = f"tensor {layout.tensor}", "layout.tensor"
        yield Gap(what=what, where=where, why=why, nearest=nearest, fix=f"{where}: 1")
    if layout.context > 1:
        why = "the program has to wrap its step in accelerator.maybe_context_parallel"
        nearest = (
            "the mesh is in the YAML, for your own TRAIN_SCRIPT: the example program refuses it"
        )
        what, where = f"context {layout.context}", "layout.context"
        yield Gap(what=what, where=where, why=why, nearest=nearest, fix=f"{where}: 1")
    if layout.recompute == "selective" and way == "FSDP":
        why = "under FSDP2 Accelerate itself recomputes, whole blocks"
        nearest = "model.gradient_checkpointing_enable() in your own TRAIN_SCRIPT"
        yield Gap(
            what=f"{layout.recompute} recompute",
            where="layout.recompute",
            why=why,
            nearest=nearest,
        )
    if layout.recompute == "full" and layout.recompute_every > 1 and way == "FSDP":
        what = f"recompute of every {layout.recompute_every}. block"
        why, nearest = "Accelerate recomputes all blocks or none", "every block is recomputed"
        where, fix = "layout.recompute_every", "layout.recompute_every: 1"
        yield Gap(what=what, where=where, why=why, nearest=nearest, fix=fix)
    if plan.precision == "tf32":
        why = "it is a setting of torch, not of Accelerate"
        nearest = 'float32, and torch.set_float32_matmul_precision("high") in your own TRAIN_SCRIPT'
        yield Gap(what="precision tf32", where="train.precision", why=why, nearest=nearest)


def _of_own_program(plan: Plan, way: Way) -> Iterator[Gap]:
    """What the example program does by `train.json`, and your own program has to do."""
    layout = plan.layout
    if way == "FSDP":
        why = (
            "Accelerate 1.15 shards by the classes that a model names in _no_split_modules, and "
            "one without them is a single unit, gathered whole (fsdp2_prepare_auto_wrap_policy)"
        )
        nearest = (
            "models of Hugging Face name them; for another TRAIN_SCRIPT, WRAP_CLASS=MyBlock "
            "./launch.sh names the class of its blocks"
        )
        what = "blocks as units of sharding"
        yield Gap(what=what, where="layout.sharding", why=why, nearest=nearest)
    keeps_shards = layout.sharding == "zero2" and layout.accumulation > 1
    if layout.reduce_every_micro_batch or keeps_shards:
        why = "accelerator.accumulate keeps whole gradients between micro-batches"
        nearest = "GradientAccumulationPlugin(sync_each_batch=True) in your own TRAIN_SCRIPT"
        what = "gradients reduced after every micro-batch"
        yield Gap(what=what, where="layout.sharding", why=why, nearest=nearest)
