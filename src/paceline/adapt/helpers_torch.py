"""What a script in the form of DDP gets, and most of it one in the form of FSDP2."""

from collections.abc import Mapping

from paceline.adapt.helper import NULLCONTEXT, SILENT, Helper

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

PLAIN: Mapping[str, Helper] = {
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
    "nullcontext": NULLCONTEXT,
    "print_once": _PRINT,
    "save_once": _SAVE,
    "agreed": _AGREED,
    "sum_over_ranks": _SUM,
    "mean_over_ranks": _MEAN,
    "Silent": SILENT,
    "once": _ONCE,
}
"""Of every script that torchrun starts."""

DDP: Mapping[str, Helper] = {**PLAIN, "distribute": _DISTRIBUTE, "unwrapped": _UNWRAPPED}
