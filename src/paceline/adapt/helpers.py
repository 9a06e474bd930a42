"""The functions that an adapted script gets: only those it calls, as plain text.

They stand in the script itself, so that it needs nothing but PyTorch (or Accelerate) and a reader
sees all of what runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.adapt.result import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """One name that the script gets."""

    text: str
    imports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


_RANKS = Helper(
    text="""\
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
""",
    imports=("import os",),
)

_DEVICE = Helper(
    text="""\
THIS_DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
""",
    imports=("import torch",),
    needs=("RANK",),
)

_JOIN = Helper(
    text='''\
def join_ranks():
    """Meet the other ranks. Without torchrun this is a world of one."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if THIS_DEVICE.type == "cuda":
        torch.cuda.set_device(THIS_DEVICE)
    dist.init_process_group("nccl" if THIS_DEVICE.type == "cuda" else "gloo")
    if RANK != 0:  # warnings and errors still come from every rank
        logging.disable(logging.INFO)
''',
    imports=("import logging", "import os", "import torch", "import torch.distributed as dist"),
    needs=("RANK", "THIS_DEVICE"),
)

_LEAVE = Helper(
    text='''\
def leave_ranks():
    """Go when all have come here. A DDP model still alive at exit can abort the interpreter."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
''',
    imports=("import gc", "import torch.distributed as dist"),
)

_SEED = Helper(
    text='''\
def share_seed():
    """One seed for all ranks, so that initial weights and random splits are the same on each."""
    seed = [torch.seed() % 2**32]
    dist.broadcast_object_list(seed, src=0, device=THIS_DEVICE)
    random.seed(seed[0])
    torch.manual_seed(seed[0])
''',
    imports=("import random", "import torch", "import torch.distributed as dist"),
    needs=("THIS_DEVICE",),
)

_PER_RANK = Helper(
    text='''\
def per_rank(batch_size):
    """This rank's share of a batch: all shares together are the batch of the one-device script."""
    if batch_size % WORLD_SIZE:
        raise SystemExit(f"batch size {batch_size} cannot be shared by {WORLD_SIZE} ranks alike")
    return batch_size // WORLD_SIZE
''',
    needs=("RANK",),
)

_DISTRIBUTE = Helper(
    text='''\
def distribute(model):
    """The model on this rank's device, its gradients averaged over all ranks."""
    model = model.to(THIS_DEVICE)
    if THIS_DEVICE.type == "cuda":  # statistics over the whole batch, as on one device
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    device_ids = [LOCAL_RANK] if THIS_DEVICE.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)
''',
    imports=("import torch", "from torch.nn.parallel import DistributedDataParallel"),
    needs=("RANK", "THIS_DEVICE"),
)

_UNWRAPPED = Helper(
    text='''\
def unwrapped(model):
    """The model itself, without what was put around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model
''',
    imports=("from torch.nn.parallel import DistributedDataParallel",),
)

_SHARD = Helper(
    text='''\
def shard(model):
    """Split parameters, gradients and optimizer state over all ranks: every layer, then the rest.

    In place, and before the optimizer is made. All ranks start from rank 0's weights.
    """
    model.to(THIS_DEVICE)
    if THIS_DEVICE.type == "cuda":  # statistics over the whole batch, as on one device
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(THIS_DEVICE.type, (WORLD_SIZE,))
    for module in list(model.modules()):
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
''',
    imports=(
        "import torch",
        "import torch.distributed as dist",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import fully_shard",
    ),
    needs=("RANK", "THIS_DEVICE"),
)

_FULL_STATE = Helper(
    text='''\
def full_state(state, everywhere=False):
    """A state dict with its shards put together, on the CPU: the form of the one-device script.

    All ranks have to call it. The tensors are kept on rank 0, or on all of them.
    """

    def whole(value):
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full.cpu() if everywhere or RANK == 0 else None

    return tree_map(whole, state)
''',
    imports=(
        "from torch.distributed.tensor import DTensor",
        "from torch.utils._pytree import tree_map",
    ),
    needs=("RANK",),
)

_LOAD_MODEL = Helper(
    text='''\
def load_full_state(model, state, **options):
    """Each rank takes its shards out of a whole state dict."""
    here = model.state_dict()
    split = {name: like(value, here.get(name)) for name, value in state.items()}
    return model.load_state_dict(split, **options)
''',
    needs=("like",),
)

_LIKE = Helper(
    text='''\
def like(value, mine):
    """A whole tensor, split and placed as this rank holds it."""
    if isinstance(mine, DTensor) and not isinstance(value, DTensor):
        value = value.to(mine.device_mesh.device_type)
        return distribute_tensor(value, mine.device_mesh, mine.placements)
    return value
''',
    imports=("from torch.distributed.tensor import DTensor, distribute_tensor",),
)

_LOAD_OPTIMIZER = Helper(
    text='''\
def is_shaped_as(value, parameter):
    return getattr(value, "shape", None) == parameter.shape


def load_full_optimizer_state(optimizer, state):
    """Each rank takes its shards out of a whole optimizer state."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    saved = [number for group in state["param_groups"] for number in group["params"]]
    split = {
        number: {
            name: like(value, parameter) if is_shaped_as(value, parameter) else value
            for name, value in state["state"][number].items()
        }
        for number, parameter in zip(saved, parameters, strict=True)
        if number in state["state"]
    }
    optimizer.load_state_dict({**state, "state": split})
''',
    needs=("like",),
)

_WHOLE = Helper(
    text='''\
def whole(value):
    """A norm or a sum of all shards, as a plain tensor. All ranks have to call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
''',
    imports=("from torch.distributed.tensor import DTensor",),
)

_PRINT = Helper(
    text='''\
def print_once(*values, **options):
    """Print on rank 0. The values are computed on every rank, so they may hold collectives."""
    if RANK == 0:
        print(*values, **options)
''',
    needs=("RANK",),
)

_SAVE = Helper(
    text='''\
def save_once(value, path):
    """Rank 0 writes the file, whole or not at all; the others wait until it is there."""
    if RANK == 0:
        torch.save(value, f"{path}.part")
        os.replace(f"{path}.part", path)
    dist.barrier()
''',
    imports=("import os", "import torch", "import torch.distributed as dist"),
    needs=("RANK",),
)

_AGREED = Helper(
    text='''\
def agreed(decision):
    """Rank 0's decision on every rank, so that all go the same way."""
    answer = torch.tensor(int(bool(decision)), device=THIS_DEVICE)
    dist.broadcast(answer, src=0)
    return bool(answer.item())
''',
    imports=("import torch", "import torch.distributed as dist"),
    needs=("THIS_DEVICE",),
)

_SUM = Helper(
    text='''\
def sum_over_ranks(value):
    """A rank's share of a sum, added up over all ranks. All ranks have to call it."""
    total = torch.as_tensor(value).detach().to(THIS_DEVICE, torch.float64)
    dist.all_reduce(total)
    return type(value)(total.item()) if isinstance(value, (int, float)) else total.item()
''',
    imports=("import torch", "import torch.distributed as dist"),
    needs=("THIS_DEVICE",),
)

_MEAN = Helper(
    text='''\
def mean_over_ranks(value):
    """The mean of a number that differs between ranks, such as the loss. All have to call it."""
    total = torch.as_tensor(value).detach().to(THIS_DEVICE, torch.float64)
    dist.all_reduce(total)
    return total.item() / WORLD_SIZE
''',
    imports=("import torch", "import torch.distributed as dist"),
    needs=("RANK", "THIS_DEVICE"),
)

_SILENT = Helper(
    text='''\
class Silent:
    """Takes every call and does nothing: a writer on the ranks that write nothing."""

    def __getattr__(self, name):
        return lambda *values, **options: None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None
''',
)

_ONCE = Helper(
    text='''\
def once(path):
    """The path on rank 0, where it is written; on the others what is written goes nowhere."""
    return path if RANK == 0 else os.devnull
''',
    imports=("import os",),
    needs=("RANK",),
)

_STREAM = Helper(
    text='''\
class ShareOfStream(IterableDataset):
    """Of every WORLD_SIZE samples in a row the one at this rank's place; a short row is dropped."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        row = []
        for sample in self.stream:
            row.append(sample)
            if len(row) == WORLD_SIZE:
                yield row[RANK]
                row = []
''',
    imports=("from torch.utils.data import IterableDataset",),
    needs=("RANK",),
)

_FIRST = Helper(
    text='''\
@contextmanager
def rank_0_first():
    """Rank 0 does it before the others."""
    if RANK != 0:
        dist.barrier()
    yield
    if RANK == 0:
        dist.barrier()
''',
    imports=("import torch.distributed as dist", "from contextlib import contextmanager"),
    needs=("RANK",),
)

_NULLCONTEXT = Helper(text="", imports=("from contextlib import nullcontext",))

_PLAIN = {
    "RANK": _RANKS,
    "THIS_DEVICE": _DEVICE,
    "join_ranks": _JOIN,
    "leave_ranks": _LEAVE,
    "share_seed": _SEED,
    "per_rank": _PER_RANK,
    "DistributedSampler": Helper(
        text="", imports=("from torch.utils.data.distributed import DistributedSampler",)
    ),
    "ShareOfStream": _STREAM,
    "rank_0_first": _FIRST,
    "nullcontext": _NULLCONTEXT,
    "print_once": _PRINT,
    "save_once": _SAVE,
    "agreed": _AGREED,
    "sum_over_ranks": _SUM,
    "mean_over_ranks": _MEAN,
    "Silent": _SILENT,
    "once": _ONCE,
}

_ACCELERATOR = Helper(
    text="""\
accelerator = Accelerator(
    cpu=not torch.accelerator.is_available(),
    # a batch is shared by the ranks, so batch sizes stay what they were
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
""",
    imports=(
        "import torch",
        "from accelerate import Accelerator",
        "from accelerate.utils import DataLoaderConfiguration",
    ),
)

_ACCELERATE = {
    "accelerator": _ACCELERATOR,
    "join_ranks": Helper(text="", needs=("accelerator",)),
    "nullcontext": _NULLCONTEXT,
    "leave_ranks": Helper(
        text='''\
def leave_ranks():
    """Go when all have come here. A DDP model still alive at exit can abort the interpreter."""
    accelerator.free_memory()
    gc.collect()
    accelerator.wait_for_everyone()
    accelerator.end_training()
''',
        imports=("import gc",),
        needs=("accelerator",),
    ),
    "share_seed": Helper(
        text='''\
def share_seed():
    """One seed for all ranks, so that initial weights and random splits are the same on each."""
    set_seed(broadcast_object_list([torch.seed() % 2**32])[0])
''',
        imports=("import torch", "from accelerate.utils import broadcast_object_list, set_seed"),
        needs=("accelerator",),
    ),
    "prepared": Helper(
        text='''\
def prepared(loader):
    """The loader, shared by the ranks, without drawing a random number that the script draws."""
    with torch.random.fork_rng(devices=[]):
        return accelerator.prepare(loader)
''',
        imports=("import torch",),
        needs=("accelerator",),
    ),
    "save_once": Helper(
        text='''\
def save_once(value, path):
    """The main process writes the file, whole or not at all; the others wait until it is there."""
    if accelerator.is_main_process:
        torch.save(value, f"{path}.part")
        os.replace(f"{path}.part", path)
    accelerator.wait_for_everyone()
''',
        imports=("import os", "import torch"),
        needs=("accelerator",),
    ),
    "agreed": Helper(
        text='''\
def agreed(decision):
    """The main process's decision on every rank, so that all go the same way."""
    return bool(broadcast_object_list([bool(decision)])[0])
''',
        imports=("from accelerate.utils import broadcast_object_list",),
        needs=("accelerator",),
    ),
    "sum_over_ranks": Helper(
        text='''\
def sum_over_ranks(value):
    """A rank's share of a sum, added up over all ranks. All ranks have to call it."""
    total = torch.as_tensor(value).detach().to(accelerator.device, torch.float64).reshape(1)
    total = accelerator.reduce(total, "sum").item()
    return type(value)(total) if isinstance(value, (int, float)) else total
''',
        imports=("import torch",),
        needs=("accelerator",),
    ),
    "mean_over_ranks": Helper(
        text='''\
def mean_over_ranks(value):
    """The mean of a number that differs between ranks, such as the loss. All have to call it."""
    total = torch.as_tensor(value).detach().to(accelerator.device, torch.float64).reshape(1)
    return accelerator.reduce(total, "mean").item()
''',
        imports=("import torch",),
        needs=("accelerator",),
    ),
    "once": Helper(
        text='''\
def once(path):
    """The path in the main process; what the others write goes nowhere."""
    return path if accelerator.is_main_process else os.devnull
''',
        imports=("import os",),
        needs=("accelerator",),
    ),
    "Silent": _SILENT,
}

HELPERS: Mapping[Target, Mapping[str, Helper]] = {
    Target.DDP: {**_PLAIN, "distribute": _DISTRIBUTE, "unwrapped": _UNWRAPPED},
    Target.FSDP2: {
        **_PLAIN,
        "shard": _SHARD,
        "full_state": _FULL_STATE,
        "like": _LIKE,
        "load_full_state": _LOAD_MODEL,
        "load_full_optimizer_state": _LOAD_OPTIMIZER,
        "whole": _WHOLE,
        "register_fsdp_forward_method": Helper(
            text="", imports=("from torch.distributed.fsdp import register_fsdp_forward_method",)
        ),
    },
    Target.ACCELERATE: _ACCELERATE,
}


ON_CPU: Mapping[str, str] = {
    'torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")': (
        'torch.device("cpu")'
    ),
    "cpu=not torch.accelerator.is_available()": "cpu=True",
}
"""What changes in the helpers of a script that trains on the CPU."""


def with_needs(target: Target, names: Iterable[str]) -> list[str]:
    """The names and all that they need, in the order they are defined."""
    table = HELPERS[target]
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(table[name].needs)
    return [name for name in table if name in found]


def bound_names(target: Target, names: Iterable[str]) -> list[str]:
    """What the helpers bind in the script: their own names and those of their imports."""
    table = HELPERS[target]
    found: list[str] = []
    for name in names:
        found.append(name)
        if name == "RANK":
            found += ["LOCAL_RANK", "WORLD_SIZE"]
        for line in table[name].imports:
            found += [each.strip() for each in line.rsplit(" ", 1)[-1:]]
    return found
