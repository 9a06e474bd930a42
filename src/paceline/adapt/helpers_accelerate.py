"""What a script in the form of Accelerate gets: the same names, by way of its Accelerator."""

from collections.abc import Mapping

from paceline.adapt.helper import NULLCONTEXT, SILENT, Helper

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

ACCELERATE: Mapping[str, Helper] = {
    "accelerator": _ACCELERATOR,
    "join_ranks": Helper(text="", needs=("accelerator",)),
    "nullcontext": NULLCONTEXT,
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
    "Silent": SILENT,
}
