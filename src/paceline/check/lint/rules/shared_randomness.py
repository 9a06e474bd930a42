"""What each rank computes by itself: batch statistics, dropout, recomputation."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.program import Program
from paceline.check.lint.rules.ddp import wrapped_models
from paceline.check.lint.values import RANK, Value


def check_batchnorm(program: Program, context: Context) -> Iterator[Finding]:
    """BatchNorm statistics of small per-GPU batches that nothing synchronises."""
    if program.has_call("torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torch.nn.SyncBatchNorm"):
        return
    norms = [
        one
        for one in program.all_calls
        if one.name.startswith("torch.nn.BatchNorm") and not one.name.endswith("Stats")
    ]
    wraps = [call for call, model in wrapped_models(program) if model.call is not None]
    known = [
        model.call
        for _, model in wrapped_models(program)
        if isinstance(model.call, Call) and model.call.name.startswith(NORMED_MODELS)
    ]
    norms = norms or known
    if not norms or not wraps:
        return
    sizes = batch_sizes(program)
    small = sizes and max(sizes) <= SMALL_BATCH
    yield program.finding(
        "batchnorm-not-synced",
        Severity.WARNING if small else Severity.INFO,
        norms[0],
        what=(
            "BatchNorm computes its statistics on each GPU's batch"
            + (f" of {max(sizes)}" if small else "")
            + ", and nothing synchronises them over the ranks"
        ),
        fix="model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP",
        seen=(wraps[0],),
    )


NORMED_MODELS = tuple(
    f"torchvision.models.{name}"
    for name in (
        "resnet",
        "resnext",
        "wide_resnet",
        "densenet",
        "mobilenet",
        "efficientnet",
        "regnet",
    )
)
"""Models of torchvision that are built of BatchNorm layers."""


SMALL_BATCH = 8
"""The failure's own bound in the catalog: statistics of at most 8 samples are too noisy."""


def batch_sizes(program: Program) -> list[int]:
    found = []
    for call in program.calls("torch.utils.data.DataLoader"):
        size = call.argument(1, "batch_size")
        if size is not None and isinstance(size.likely(), int):
            found.append(size.likely())
    return found


def check_same_dropout(program: Program, context: Context) -> Iterator[Finding]:
    """One seed on every rank, and a model that draws random numbers."""
    if not program.wraps or not any(
        one.name.startswith("torch.nn.Dropout") for one in program.all_calls
    ):
        return
    seeds = program.calls(
        "torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"
    )
    if not seeds or any(RANK in arg.taints for one in seeds for arg in one.args):
        return
    last = seeds[-1]
    if last.args and last.args[0].likely() is not None:
        yield program.finding(
            "same-dropout-all-ranks",
            Severity.INFO,
            last,
            what="every rank has the same seed: dropout masks are the same on all of them",
            fix="seed with `seed + rank` after the model is made",
        )


TENSOR_PARALLEL = ("ColumnParallelLinear", "RowParallelLinear", ".parallelize_module")
TRACKED = ("rng_tracker", "model_parallel_cuda_manual_seed", "set_random_seed", "get_coordinate")


def check_tensor_parallel_dropout(program: Program, context: Context) -> Iterator[Finding]:
    """Dropout in a model whose ranks share one layer: what they draw must fit what they hold."""
    parallel = [one for one in program.all_calls if one.name.endswith(TENSOR_PARALLEL)]
    parallel += [one for one in program.collectives if in_layer(one)]
    drops = [one for one in program.all_calls if drops_something(one)]
    if not parallel or not drops or program.mentions(*TRACKED):
        return
    seeds = program.calls(
        "torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"
    )
    by_rank = [one for one in seeds for arg in one.args if is_rank_itself(arg)]
    yield program.finding(
        "tp-dropout-rng",
        Severity.WARNING if by_rank else Severity.INFO,
        by_rank[0] if by_rank else drops[0],
        what=(
            "every rank draws other numbers, so ranks that share a layer "
            f"(line {parallel[0].line}) drop different parts of what they all hold: their copies "
            "of it differ"
            if by_rank
            else "ranks that share a layer draw the same numbers for the parts that each holds "
            "alone, or different ones for what all hold, unless seeds follow the mesh"
        ),
        fix="seed by the data-parallel coordinate, and draw for sharded activations from a "
        "generator of the tensor-parallel one",
        seen=(parallel[0], drops[0]),
    )


def in_layer(call: Call) -> bool:
    """Whether ranks add up what each has computed inside a layer's own forward pass."""
    own = call.function
    if own is None or own.name != "forward" or own.own_class is None:
        return False
    group = call.argument(None, "group")
    return call.name.endswith("all_reduce") and group is not None and group.const is not None


def drops_something(call: Call) -> bool:
    """A dropout that is not switched off."""
    if not call.name.startswith(("torch.nn.Dropout", "torch.nn.functional.dropout")):
        return False
    share = call.argument(0 if call.name.startswith("torch.nn.Dropout") else 1, "p")
    return share is None or share.likely() != 0


def is_rank_itself(seed: Value) -> bool:
    """`seed + rank`, and neither `rank % n` nor `rank // n`."""
    if RANK not in seed.taints:
        return False
    signs = [one.operation[0] for one in seed.origins() if one.operation is not None]
    return not {"Mod", "FloorDiv"} & set(signs)


RULES = (
    check_batchnorm,
    check_same_dropout,
    check_tensor_parallel_dropout,
)
