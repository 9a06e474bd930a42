"""How one kind of model may be split: the plan a person can write in a few lines.

    Ways(
        blocks="layers",
        first=("embedding",),
        last=("norm", "head"),
        tensor={
            "embedding": "embedding",
            "*.attention.q": "column",
            "*.attention.k": "column",
            "*.attention.v": "column",
            "*.attention.o": "row",
            "*.mlp.up": "column",
            "*.mlp.down": "row",
            "head": "head",
        },
        attention="attention",
    )

Names are dotted module names from the model; one that starts with `*.` is inside every block. What
is not named is held whole by every tensor rank, and its gradients are summed where the ranks see
different tokens or heads: norms and dropout need no entry.

Known models are in `ways_known`; a model of another kind carries its own as `paceline_ways`, is
given one, or is read by `generic_ways`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from torch import nn

from paceline.errors import PlanError

Way = Literal[
    "column",
    "row",
    "embedding",
    "head",
    "sequence",
    "gather",
    "sum",
    "join",
    "experts",
    "wide norm",
    "behind",
]
"""How a module's matrices are split over the tensor ranks.

`column`: by output features; needs its whole input, gives this rank's features.
`row`: by input features; takes this rank's, gives the sum over the ranks.
`embedding`: by rows of the vocabulary.
`head`: by rows of the vocabulary, and the logits stay split (a DTensor).
`sequence`: whole; said only to be explicit, as it holds for all that is not named.
`gather`: a container whose input must be whole. The parent of a `row` is one without being named,
unless that is the block itself.
`sum`: a `gather` whose output is the sum over the ranks; the rows in it give terms of that.
`experts`: routed experts, split by expert; inside a `sum`.
`join`: the last module that runs on its share of the tokens, for models whose code after it needs
the sample's length. Unnamed, that is the head's input.
`wide norm`: an RMSNorm over the features of all heads, which the ranks share.
`behind`: whole, and inside a container: takes the sum that a row gives, as LoRA's second matrix.
"""

T = TypeVar("T")

WAYS: frozenset[str] = frozenset(get_args(Way))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How one kind of model may be split."""

    blocks: str
    """Name of the list of blocks, each of which takes hidden states and gives hidden states."""

    first: tuple[str, ...]
    """Modules only the first pipeline stage needs, before the blocks."""

    last: tuple[str, ...]
    """Modules only the last stage needs, after the blocks."""

    tensor: Mapping[str, Way] = field(default_factory=dict)
    """Name of a module -> its way. Empty where matrices cannot be split."""

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a linear whose output is several ones after each other -> their names. Each part is
    split by itself, so each becomes a linear of its own: `*.mlp.gate_up` with (`gate`, `up`)."""

    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a module -> its attributes that count heads or their features, which the model's
    code needs as this rank has them. `config.num_heads` is one of a configuration it holds."""

    experts: str | None = None
    """Name inside a block of the routed experts' module."""

    attention: str | None = None
    """Name inside a block of the attention module. With sequence parallelism it must be known, as
    all else in a block may see a share of the tokens only."""

    def __post_init__(self) -> None:
        unknown = {way for way in self.tensor.values() if way not in WAYS}
        if unknown:
            raise PlanError.of(
                code="L020",
                what=f"Ways.tensor has {', '.join(sorted(unknown))}, which is no way to split",
                where="paceline_ways",
                fix=f"write one of {', '.join(sorted(WAYS))}",
            )


def block_modules(model: nn.Module, ways: Ways) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each block this rank holds, in order.

    A block of another pipeline stage has no parameters and is left out.
    """
    blocks = model.get_submodule(ways.blocks)
    for name, block in blocks.named_children():
        if next(block.parameters(), None) is not None:
            yield f"{ways.blocks}.{name}", block


def named_ways(model: nn.Module, ways: Ways) -> dict[str, Way]:
    """Name of each module that is here -> its way, with `*.` written out for every block."""
    return dict(written_out(model, ways, ways.tensor))


def written_out(model: nn.Module, ways: Ways, table: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    blocks = dict(block_modules(model, ways))
    for name, value in table.items():
        if not name.startswith("*."):
            if _has(model, name):
                yield name, value
            continue
        inside = name.removeprefix("*.")
        for place, block in blocks.items():
            if _has(block, inside):
                yield f"{place}.{inside}", value


def containers_of(model: nn.Module, ways: Ways, named: Mapping[str, Way]) -> set[str]:
    """Modules inside blocks that are entered as a whole: named so, or the parents of rows."""
    blocks = {name for name, _ in block_modules(model, ways)}
    parents = {name.rpartition(".")[0] for name, way in named.items() if way == "row"}
    named_so = {name for name, way in named.items() if way in ("gather", "sum")}
    outer = {name for name in parents - blocks if not is_inside(name, named_so)}
    return named_so | outer


def is_inside(name: str, containers: set[str]) -> bool:
    """Whether a module is below one of these."""
    return any(name.startswith(f"{container}.") for container in containers)


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module of that name is here, and not only the place of another stage's."""
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return False
    return next(found.parameters(), None) is not None
