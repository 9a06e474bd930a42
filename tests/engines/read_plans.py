"""Reads the files of many plans with an engine's own code: one line of JSON for each folder.

    python read_plans.py ENGINE FOLDER ...

What is printed has the engine's own words turned into those of a layout, and nothing else; a folder
that the engine refuses ends the program.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch


def deepspeed(folder: Path, ranks: int) -> dict[str, Any]:
    """By DeepSpeedConfig, for the data ranks of its pipeline section."""
    from deepspeed.runtime import config as runtime

    values = json.loads((folder / "ds_config.json").read_text())
    pipeline = values.get("pipeline", {}).get("stages", 1)
    where = "deepspeed.runtime.config.dist"
    with (
        patch(f"{where}.get_rank", return_value=0),
        patch(f"{where}.get_world_size", return_value=ranks // pipeline),
    ):
        found = runtime.DeepSpeedConfig(values)
    zero, again = found.zero_config, found.activation_checkpointing_config
    assert not pipeline > 1 or found.pipeline["stages"] == pipeline
    checkpoints = again.number_checkpoints is not None
    if pipeline > 1:
        checkpoints = found.pipeline["activation_checkpoint_interval"] > 0
    device = zero.offload_optimizer.device.value if zero.offload_optimizer else "none"
    stage = int(zero.stage)
    return {
        "data": found.world_size,
        "micro_batch": found.train_micro_batch_size_per_gpu,
        "accumulation": found.gradient_accumulation_steps,
        "pipeline": pipeline,
        "sharding": ("none", "zero1", "zero2", "full")[stage]
        if found.world_size > 1 or stage != 1
        else "none",
        "recompute": "full" if checkpoints else "none",
        "offload": device,
        "offload_parameters": bool(
            zero.offload_param and zero.offload_param.device.value != "none"
        ),
    }


def accelerate(folder: Path, ranks: int) -> dict[str, Any]:
    """By its config loader, the launcher's parser, the FSDP plugin and ParallelismConfig."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import launch as launchers

    config = str(folder / "accelerate.yaml")
    load_config_from_file(config)
    more = ["--machine_rank", "0", "--main_process_ip", "192.0.2.1", "--main_process_port", "29500"]
    args = launch.launch_command_parser().parse_args(["--config_file", config, *more, "train.py"])
    args, _, _ = launch._validate_launch_command(args)
    assert args.num_processes == ranks
    with patch.dict(os.environ):
        os.environ.update(launchers.prepare_multi_gpu_env(args))
        if not args.use_fsdp:
            return {"sharding": "none"}
        with (  # the plugin of version 1 looks for the device it would fill
            patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
            patch("torch.cuda.current_device", return_value=0),
        ):
            plugin = FullyShardedDataParallelPlugin()
        mesh = ParallelismConfig()
    moves = plugin.cpu_offload
    found = {
        "offload": "cpu"
        if getattr(moves, "offload_params", moves.__class__.__name__[:3] == "CPU")
        else "none",
        "recompute": "full" if plugin.activation_checkpointing else "none",
    }
    if plugin.fsdp_version == 1:
        strategies = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "zero2", "HYBRID_SHARD": "hybrid"}
        return found | {"sharding": strategies[plugin.sharding_strategy.name]}
    whole = "hybrid" if mesh.dp_replicate_size > 1 else "full"
    return found | {
        "sharding": whole if plugin.reshard_after_forward else "zero2",
        "shard": mesh.dp_shard_size * mesh.cp_size,
        "data": mesh.dp_shard_size * mesh.dp_replicate_size,
        "tensor": mesh.tp_size,
        "context": mesh.cp_size,
    }


def torchtitan(folder: Path, ranks: int) -> dict[str, Any]:
    """By its ConfigManager, ParallelDims and torch's schedules."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    sys.modules.pop("paceline_job", None)
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    config = ConfigManager().parse_args(["--module", "paceline_job", "--config", "job"])
    sys.path.remove(str(folder))
    ways, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_replicate=ways.data_parallel_replicate_degree,
        dp_shard=ways.data_parallel_shard_degree,
        cp=ways.context_parallel_degree,
        tp=ways.tensor_parallel_degree,
        pp=ways.pipeline_parallel_degree,
        ep=ways.expert_parallel_degree,
        world_size=ranks,
    )
    get_schedule_class(ways.pipeline_parallel_schedule)
    data = dims.dp_replicate * dims.dp_shard
    micro = ways.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    kinds = {"NoneType": "none", "SelectiveAC": "selective", "FullAC": "full"}
    again = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    sharded = "hybrid" if dims.dp_replicate > 1 else "full"
    if ways.fsdp_reshard_after_forward != "always":
        sharded = "zero2"
    return {
        "data": data,
        "sharding": sharded if dims.dp_shard * dims.cp > 1 else "none",
        "shard": dims.dp_shard * dims.cp,
        "micro_batch": micro,
        "accumulation": training.global_batch_size // (data * micro),
        "tensor": dims.tp,
        "context": dims.cp,
        "pipeline": dims.pp,
        "expert": dims.ep,
        "recompute": kinds[again],
        "offload": "cpu" if training.enable_cpu_offload else "none",
    }


_FIELDS = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "swiglu": "gated_linear_unit",
}
"""Flags of Megatron-LM -> fields of Megatron Core, where the names differ (arguments.py, 0.16.1,
`core_transformer_config_from_args`)."""


def megatron(folder: Path, ranks: int) -> dict[str, Any]:
    """By megatron-core: its TransformerConfig, OptimizerConfig, groups of ranks and calculator of
    micro-batches. Megatron-LM's parser is in no package; tests/render/megatron_flags.txt has its
    flags."""
    import dataclasses

    import torch
    from megatron.core import num_microbatches_calculator as micro_batches
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    words: dict[str, Any] = {}
    for line in (folder / "arguments.txt").read_text().splitlines():
        flag, _, text = line.removeprefix("--").partition(" ")
        if line.startswith("--"):
            flag = flag.replace("-", "_")
            words[_FIELDS.get(flag, flag)] = _value(text)

    def fields_of(kind: type) -> dict[str, Any]:
        names = {each.name for each in dataclasses.fields(kind)}
        return {name: value for name, value in words.items() if name in names}

    core = fields_of(TransformerConfig)
    core["attention_backend"] = AttnBackend[core.get("attention_backend", "auto")]
    core |= {
        "add_bias_linear": "disable_bias_linear" not in words,
        "activation_func": torch.nn.functional.silu
        if core.get("gated_linear_unit")
        else torch.nn.functional.gelu,
        "pipeline_dtype": torch.bfloat16,
    }
    config = TransformerConfig(**core)
    # Transformer Engine, whose version is asked, needs GPUs.
    with patch("megatron.core.optimizer.optimizer_config.is_te_min_version", return_value=True):
        optimizer = OptimizerConfig(**fields_of(OptimizerConfig))
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context, expert = config.context_parallel_size, config.expert_model_parallel_size
    data = ranks // (tensor * pipeline * context)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tensor, 1, data, pipeline, context, order)
    experts_tensor = config.expert_tensor_parallel_size
    experts_data = ranks // (experts_tensor * expert * pipeline)
    routed = RankGenerator(experts_tensor, expert, experts_data, pipeline, 1, order)
    assert dense.world_size == routed.world_size == ranks
    dp_cp = len(dense.get_ranks("dp-cp")[0])
    micro_batches.init_num_microbatches_calculator(
        0, None, words["global_batch_size"], words["micro_batch_size"], data, False
    )
    accumulation = micro_batches.get_num_microbatches()
    micro_batches.destroy_num_microbatches_calculator()
    parts = config.pipeline_model_parallel_layout
    if parts is not None:
        parts.validate_layer_layout(config.num_layers, None)
    chunks = parts.virtual_pipeline_model_parallel_size if parts is not None else None
    return {
        "data": len(dense.get_ranks("dp")[0]),
        "sharding": "zero1" if optimizer.use_distributed_optimizer and dp_cp > 1 else "none",
        "micro_batch": words["micro_batch_size"],
        "accumulation": accumulation,
        "tensor": tensor,
        "context": context,
        "expert": expert,
        "pipeline": pipeline,
        "chunks": chunks or config.virtual_pipeline_model_parallel_size or 1,
        "recompute": config.recompute_granularity or "none",
        "offload": "cpu" if optimizer.optimizer_cpu_offload else "none",
    }


def _value(text: str) -> Any:
    """What a flag's text is."""
    if not text:
        return True
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


READERS = {
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "fsdp1": accelerate,
    "torchtitan": torchtitan,
    "megatron": megatron,
}


def main() -> None:
    """Every folder's ranks are in its file `ranks`."""
    read = READERS[sys.argv[1]]
    for name in sys.argv[2:]:
        folder = Path(name)
        found = read(folder, int((folder / "ranks").read_text()))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
