"""The names by which libraries' functions and classes are known here, whatever a program imports.

`from torch.nn.parallel.distributed import DistributedDataParallel as DDP` and
`torch.nn.parallel.DistributedDataParallel` are one name.
"""

from collections.abc import Mapping

from paceline.catalog.load import read_shipped
from paceline.check.lint.words import words_of

DDP = "torch.nn.parallel.DistributedDataParallel"
DATA_PARALLEL = "torch.nn.DataParallel"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
FULLY_SHARD = "torch.distributed.fsdp.fully_shard"
DATALOADER = "torch.utils.data.DataLoader"
DISTRIBUTED_SAMPLER = "torch.utils.data.DistributedSampler"
AUTOCAST = "torch.amp.autocast"
INIT_GROUP = "torch.distributed.init_process_group"
ACCELERATOR = "accelerate.Accelerator"
DEEPSPEED_INIT = "deepspeed.initialize"

MOVED: Mapping[str, str] = read_shipped("software.toml")["python"]["moved"]
"""Where a name, or everything below a module, is found as well."""


KNOWN_LIBRARIES = words_of("python", "known_libraries")
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


COLLECTIVES = words_of("python", "collectives")
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

RETURNS_EQUAL = words_of("python", "returns_equal")
"""Calls whose result is the same on every rank, whatever goes in."""

RANK_CALLS = words_of("python", "rank_calls")

LOCAL_RANK_WORDS = words_of("python", "local_rank_words")

RANK_ENVIRONMENT = words_of("python", "rank_environment")

RANK_NAMES = words_of("python", "rank_names")

MAIN_NAMES = words_of("python", "main_names")


SAME_OBJECT = words_of("python", "same_object")
"""Methods of a module that return the module."""

CLOCKS = frozenset({"time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now"})

KINDS: Mapping[str, str] = {
    name: kind
    for kind, names in read_shipped("software.toml")["python"]["kinds"].items()
    for name in names.split()
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
