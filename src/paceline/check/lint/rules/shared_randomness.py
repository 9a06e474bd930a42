"""What each rank computes by itself: batch statistics, dropout, recomputation."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import DDP
from paceline.check.lint.program import Program
from paceline.check.lint.rules.ddp import wrapped_models
from paceline.check.lint.values import RANK


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


def check_reentrant(program: Program, context: Context) -> Iterator[Finding]:
    """Re-entrant activation checkpointing under DDP marks parameters ready twice."""
    wraps = [one for one in program.calls(DDP) if not is_static(one)]
    if not wraps:
        return
    reported: set[int] = set()
    for call in program.calls(
        "torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential"
    ):
        reentrant = call.argument(None, "use_reentrant")
        if (call.open_ended and reentrant is None) or id(call.node) in reported:
            continue
        if reentrant is not None and reentrant.const is not True:
            continue
        reported.add(id(call.node))
        explicit = reentrant is not None
        yield program.finding(
            "ddp-ready-twice-reentrant",
            Severity.ERROR if explicit else Severity.WARNING,
            call.keyword_nodes.get("use_reentrant", call.node),
            what=(
                "re-entrant checkpointing runs its own backward pass inside DDP's: parameters are "
                "marked ready twice and DDP raises"
            ),
            fix="pass use_reentrant=False",
            seen=(wraps[0],),
        )


def is_static(call: Call) -> bool:
    static = call.argument(None, "static_graph")
    return call.open_ended or (static is not None and static.const is not False)


RULES = (
    check_batchnorm,
    check_same_dropout,
    check_reentrant,
)
