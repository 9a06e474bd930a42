"""The names by which libraries' functions and classes are known here, whatever a program imports.

`from torch.nn.parallel.distributed import DistributedDataParallel as DDP` and
`torch.nn.parallel.DistributedDataParallel` are one name.
"""

from collections.abc import Mapping

DDP = "torch.nn.parallel.DistributedDataParallel"
DATA_PARALLEL = "torch.nn.DataParallel"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
FULLY_SHARD = "torch.distributed.fsdp.fully_shard"
DATALOADER = "torch.utils.data.DataLoader"
DISTRIBUTED_SAMPLER = "torch.utils.data.DistributedSampler"
GRAD_SCALER = "torch.amp.GradScaler"
AUTOCAST = "torch.amp.autocast"
INIT_GROUP = "torch.distributed.init_process_group"
ACCELERATOR = "accelerate.Accelerator"
DEEPSPEED_INIT = "deepspeed.initialize"

MOVED: Mapping[str, str] = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.nn.parallel.DataParallel": DATA_PARALLEL,
    "torch.nn.parallel.data_parallel.DataParallel": DATA_PARALLEL,
    "torch.distributed.fsdp.fully_sharded_data_parallel": "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp": "torch.distributed.fsdp",
    "torch.distributed._composable.fully_shard": FULLY_SHARD,
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.utils.data.distributed.DistributedSampler": DISTRIBUTED_SAMPLER,
    "torch.utils.data.distributed": "torch.utils.data",
    "torch.utils.data.dataloader": "torch.utils.data",
    "torch.utils.data.dataset": "torch.utils.data",
    "torch.utils.data.sampler": "torch.utils.data",
    "torch.cuda.amp.GradScaler": GRAD_SCALER,
    "torch.cuda.amp.grad_scaler.GradScaler": GRAD_SCALER,
    "torch.cuda.amp.autocast": "torch.cuda.amp.autocast",
    "torch.autocast": AUTOCAST,
    "torch.amp.autocast_mode.autocast": AUTOCAST,
    "torch.nn.utils.clip_grad": "torch.nn.utils",
    "torch.nn.modules.batchnorm": "torch.nn",
    "torch.nn.modules": "torch.nn",
    "torch.optim.adamw": "torch.optim",
    "torch.optim.adam": "torch.optim",
    "torch.optim.sgd": "torch.optim",
    "torch.random.manual_seed": "torch.manual_seed",
    "accelerate.accelerator": "accelerate",
    "pytorch_lightning": "lightning.pytorch",
    "lightning.Trainer": "lightning.pytorch.Trainer",
    "lightning.LightningModule": "lightning.pytorch.LightningModule",
    "lightning.LightningDataModule": "lightning.pytorch.LightningDataModule",
    "lightning.Callback": "lightning.pytorch.Callback",
    "lightning.seed_everything": "lightning.pytorch.seed_everything",
    "lightning.Fabric": "lightning.fabric.Fabric",
    "lightning_fabric": "lightning.fabric",
    "deepspeed.runtime.engine": "deepspeed",
    "transformers.trainer": "transformers",
    "transformers.training_args": "transformers",
    "torch.distributed.checkpoint.state_dict_saver": "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict_loader": "torch.distributed.checkpoint",
}
"""Where a name, or everything below a module, is found as well."""


KNOWN_LIBRARIES = frozenset(
    {
        "accelerate",
        "apex",
        "bitsandbytes",
        "datasets",
        "deepspeed",
        "evaluate",
        "horovod",
        "huggingface_hub",
        "jax",
        "lightning",
        "lightning_fabric",
        "mlx",
        "numpy",
        "peft",
        "pytorch_lightning",
        "ray",
        "safetensors",
        "tensorflow",
        "timm",
        "torch",
        "torchdata",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "transformers",
        "trl",
        "wandb",
        "webdataset",
    }
)
"""Libraries whose names mean something here, also where a linted folder is called like one."""


def canonical(name: str) -> str:
    """The one name of what a program reaches by several."""
    if name in MOVED:
        return MOVED[name]
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:length])
        if head in MOVED:
            return canonical_once(f"{MOVED[head]}.{'.'.join(parts[length:])}")
    return name


def canonical_once(name: str) -> str:
    """A name that may have moved once more as a whole."""
    return MOVED.get(name, name)


COLLECTIVES = frozenset(
    f"torch.distributed.{name}"
    for name in (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "new_group",
        "new_subgroups",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
    )
) | frozenset(
    {
        "accelerate.Accelerator.gather",
        "accelerate.Accelerator.gather_for_metrics",
        "accelerate.Accelerator.reduce",
        "accelerate.Accelerator.wait_for_everyone",
        "accelerate.Accelerator.pad_across_processes",
        "accelerate.utils.broadcast",
        "accelerate.utils.broadcast_object_list",
        "accelerate.utils.gather",
        "accelerate.utils.gather_object",
        "accelerate.utils.reduce",
        "accelerate.PartialState.wait_for_everyone",
        "lightning.fabric.Fabric.barrier",
        "lightning.fabric.Fabric.all_reduce",
        "lightning.fabric.Fabric.all_gather",
        "lightning.fabric.Fabric.broadcast",
        "horovod.torch.allreduce",
        "horovod.torch.allreduce_",
        "horovod.torch.allgather",
        "horovod.torch.broadcast",
        "horovod.torch.broadcast_parameters",
        "horovod.torch.broadcast_optimizer_state",
        "horovod.torch.broadcast_object",
        "horovod.torch.barrier",
        "deepspeed.comm.barrier",
        "deepspeed.comm.all_reduce",
        "deepspeed.comm.broadcast",
        "deepspeed.comm.all_gather",
    }
)
"""Calls that every rank of the group has to make, in the same order."""

WRITES_EQUAL = {
    "all_reduce": (0,),
    "all_reduce_coalesced": (0,),
    "broadcast": (0,),
    "broadcast_object_list": (0,),
    "all_gather": (0,),
    "all_gather_object": (0,),
    "all_gather_into_tensor": (0,),
}
"""Collectives of torch.distributed and the arguments that all ranks hold alike afterwards."""

RETURNS_EQUAL = frozenset(
    {
        "accelerate.Accelerator.gather",
        "accelerate.Accelerator.gather_for_metrics",
        "accelerate.Accelerator.reduce",
        "accelerate.Accelerator.check_trigger",
        "accelerate.utils.broadcast",
        "accelerate.utils.broadcast_object_list",
        "accelerate.utils.gather",
        "accelerate.utils.gather_object",
        "accelerate.utils.reduce",
        "lightning.fabric.Fabric.all_reduce",
        "lightning.fabric.Fabric.all_gather",
        "lightning.fabric.Fabric.broadcast",
        "horovod.torch.allreduce",
        "horovod.torch.allgather",
        "horovod.torch.broadcast",
        "horovod.torch.broadcast_object",
        "torch.nn.utils.clip_grad_norm_",
        "accelerate.Accelerator.clip_grad_norm_",
        "torch.distributed.nn.all_reduce",
        "torch.distributed.nn.functional.all_reduce",
        "torch.distributed._functional_collectives.all_reduce",
        "torch.distributed.get_world_size",
        "torch.cuda.device_count",
    }
)
"""Calls whose result is the same on every rank, whatever goes in."""

RANK_CALLS = frozenset(
    {
        "torch.distributed.get_rank",
        "torch.distributed.get_node_local_rank",
        "torch.cuda.current_device",
        "horovod.torch.rank",
        "horovod.torch.local_rank",
        "deepspeed.comm.get_rank",
        "deepspeed.comm.get_local_rank",
        "ray.train.get_context.get_world_rank",
        "ray.train.get_context.get_local_rank",
        "ray.train.get_context.get_node_rank",
        "accelerate.PartialState.process_index",
        "jax.process_index",
        "torch.cuda.memory_allocated",
        "torch.cuda.mem_get_info",
        "socket.gethostname",
        "torch.distributed.get_group_rank",
        "lightning.pytorch.utilities.rank_zero_only.rank",
    }
)

LOCAL_RANK_WORDS = frozenset(
    {
        "local_rank",
        "LOCAL_RANK",
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_process_index",
    }
)

RANK_ENVIRONMENT = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "GROUP_RANK",
        "NODE_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK",
        "PMIX_RANK",
        "HOSTNAME",
    }
)

RANK_NAMES = frozenset(
    {
        "rank",
        "local_rank",
        "global_rank",
        "node_rank",
        "world_rank",
        "ddp_rank",
        "ddp_local_rank",
        "dist_rank",
        "proc_id",
        "process_index",
        "local_process_index",
        "rank_id",
        "dp_rank",
    }
)

MAIN_NAMES = frozenset(
    {
        "is_main",
        "is_main_process",
        "is_local_main_process",
        "is_world_process_zero",
        "is_local_process_zero",
        "is_global_zero",
        "is_rank_zero",
        "is_rank_0",
        "is_rank0",
        "is_master",
        "is_master_process",
        "master_process",
        "main_process",
        "is_chief",
        "is_root",
        "is_leader",
        "is_last_process",
        "is_first_rank",
    }
)

FILE_CALLS = frozenset(
    {
        "os.path.exists",
        "os.path.isfile",
        "os.path.isdir",
        "os.path.lexists",
        "os.path.getmtime",
        "os.path.getsize",
        "os.listdir",
        "os.scandir",
        "os.walk",
        "os.stat",
        "os.access",
        "glob.glob",
        "glob.iglob",
        "transformers.trainer_utils.get_last_checkpoint",
    }
)

FILE_METHODS = frozenset({"exists", "is_file", "is_dir", "iterdir", "glob", "rglob"})
"""Methods of a pathlib.Path that ask the file system."""

SAME_OBJECT = frozenset(
    {
        "to",
        "cuda",
        "cpu",
        "half",
        "float",
        "bfloat16",
        "double",
        "train",
        "eval",
        "requires_grad_",
        "apply",
        "compile",
        "to_empty",
        "__enter__",
    }
)
"""Methods of a module that return the module."""

CLOCKS = frozenset({"time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now"})

KINDS: Mapping[str, str] = {
    DATALOADER: "loader",
    "torchdata.stateful_dataloader.StatefulDataLoader": "loader",
    "webdataset.WebLoader": "loader",
    "torch_geometric.loader.DataLoader": "loader",
    "torch_geometric.loader.NeighborLoader": "loader",
    DISTRIBUTED_SAMPLER: "sampler",
    "torch.utils.data.RandomSampler": "sampler",
    "torch.utils.data.SequentialSampler": "sampler",
    "torch.utils.data.WeightedRandomSampler": "sampler",
    "torch.utils.data.BatchSampler": "sampler",
    "torch.utils.data.SubsetRandomSampler": "sampler",
    "torch.utils.data.TensorDataset": "dataset",
    "torch.utils.data.Subset": "dataset",
    "torch.utils.data.ConcatDataset": "dataset",
    "torchvision.datasets.ImageFolder": "dataset",
    "datasets.load_dataset": "dataset",
    "datasets.load_from_disk": "dataset",
    "webdataset.WebDataset": "dataset",
    "webdataset.DataPipeline": "dataset",
    GRAD_SCALER: "scaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": "scaler",
    ACCELERATOR: "accelerator",
    "lightning.fabric.Fabric": "fabric",
    "lightning.pytorch.Trainer": "trainer",
    "transformers.Trainer": "trainer",
    "transformers.Seq2SeqTrainer": "trainer",
    "trl.SFTTrainer": "trainer",
    "torch.device": "device",
    "argparse.ArgumentParser": "parser",
    "torch.distributed.device_mesh.init_device_mesh": "mesh",
    "torch.Generator": "generator",
    "pathlib.Path": "path",
}

MODEL_MODULES = ("torch.nn.", "torchvision.models.", "timm.", "segmentation_models_pytorch.")
NOT_MODELS = ("torch.nn.functional.", "torch.nn.utils.", "torch.nn.init.", "torch.nn.parallel.")


def kind_of(name: str) -> str | None:
    """What the call of a qualified name makes: model, optimizer, loader ..."""
    if name in KINDS:
        return KINDS[name]
    last = name.rpartition(".")[2]
    if name.startswith("torch.optim.lr_scheduler.") or name.endswith("_schedule_with_warmup"):
        return "scheduler"
    if name.startswith(("torch.optim.", "bitsandbytes.optim.", "apex.optimizers.")):
        return "optimizer"
    if name.startswith("transformers.") and name.endswith((".from_pretrained", ".from_config")):
        return "tokenizer" if "Tokenizer" in name or "Processor" in name else _hf_kind(name)
    if name.startswith("transformers.") and last.startswith(("GPT", "Llama", "Bert", "Mixtral")):
        return "model" if not last.endswith(("Config", "Tokenizer")) else None
    if name.startswith("torchvision.datasets."):
        return "dataset"
    if name in {"torch.nn.Parameter", "torch.nn.Buffer"}:
        return None
    if name.startswith(MODEL_MODULES) and not name.startswith(NOT_MODELS):
        return "model" if last[:1].isupper() or name.startswith(MODEL_MODULES[1:]) else None
    return None


def _hf_kind(name: str) -> str | None:
    return None if "Config" in name else "model"


def kind_by_name(name: str) -> str | None:
    """What a parameter or unknown name most likely holds, by the way authors name things."""
    low = name.lower().lstrip("_")
    if low in {"accelerator", "fabric", "trainer", "engine", "model_engine", "tokenizer"}:
        return "engine" if low == "model_engine" else low
    if low in {"model", "net", "network", "ddp_model", "fsdp_model", "raw_model", "llm", "module"}:
        return "model"
    if low.endswith(("loader", "dataloader", "_dl")) or low == "dl":
        return "loader"
    if low in {"optimizer", "opt", "optim"} or low.endswith("_optimizer"):
        return "optimizer"
    if low in {"scheduler", "lr_scheduler", "sched"}:
        return "scheduler"
    if low.endswith("sampler"):
        return "sampler"
    if low in {"scaler", "grad_scaler"}:
        return "scaler"
    if low in {"dataset", "ds", "train_ds", "val_ds"} or low.endswith(("_dataset", "_set")):
        return "dataset"
    return None
