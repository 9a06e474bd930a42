"""How the matrices and stages of known kinds of models may be split, from `families.toml`.

Paceline's own decoder, and decoders of Hugging Face by family. What a model of another kind may
carry as `paceline_ways`, and what is done with any of them, is in `runtime.strategy.ways`;
tests/runtime/test_tensor.py compares each with the model on one rank.

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
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from paceline.catalog.load import read_key
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


def _by_module(row: dict[str, Any]) -> dict[str, Any]:
    """The row with each module's way, which it lists by the way."""
    return row | {"tensor": {name: way for way, names in row["tensor"].items() for name in names}}


_WAYS = read_key("families.toml", "split", Ways, _by_module)

OWN = _WAYS.pop("own")
"""Ways of `runtime.decoder.Decoder`."""

HUGGING_FACE: Mapping[str, Ways] = _WAYS
"""`model_type` -> ways of its class `...ForCausalLM`."""

UNSPLIT: Mapping[str, tuple[str, ...]] = {
    "cohere": ("use_qk_norm",),  # a norm with weights of its own for each head
    "falcon": ("alibi",),  # a slope for each head, made outside of the blocks
    "stablelm": ("qk_layernorm",),
}
"""`model_type` -> settings of its configuration with which matrices are not split."""
