"""Software that runs a training step: what it keeps and what it hides, from `engines.toml`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args

from paceline.catalog._rows import amount, make_row, whole
from paceline.catalog.load import read_shipped
from paceline.job.engine import is_before

Amount = Annotated[float, amount]
Count = Annotated[int, whole]
RoutedSplit = Literal["whole", "width", "always width", "expert"]
Way = Literal[
    "fsdp_throughout",
    "once_in_pipeline",
    "bucket_copies",
    "autocasts",
    "crosses_apart",
    "groups_experts",
    "gathers_head",
    "keeps_sums",
    "sums_experts",
    "restores_frozen",
    "fills_first",
    "launches_ahead",
    "runs_ahead",
    "transformers",
    "frees_gradients",
    "side_streams",
    "keeps_outputs",
    "splits_loss",
    "gathers_again",
    "gathers_at_end",
    "all_reduces",
    "replicas_wait",
    "zero1_waits",
    "flat_step",
    "hosts_gradients",
    "hosts_sums",
    "one_copy_a_node",
    "hides_exchange",
    "repeats_exchange",
    "sends_whole",
    "rings_wide",
]
ROUTED_SPLITS: tuple[RoutedSplit, ...] = get_args(RoutedSplit)
"""What tensor ranks divide of the routed experts: nothing, the width of each expert where no expert
ranks share them, the width always, or the list of experts where no expert ranks share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One software stack. Fields are explained at the top of `engines.toml`."""

    name: str
    weight_bytes: Amount
    sharded_bytes: Amount
    gradient_bytes: Amount
    passing_bytes: Amount
    master_bytes: Amount
    reduce_bytes: Amount
    step_bytes: Amount
    buffer_bytes: Amount
    cast_bytes: Amount
    attention: Literal["flash1", "flash2", "flash3", "flex", "unfused"]
    host: Literal["eager", "fused", "compiled"]
    graphs_on: tuple[str, ...]
    overlaps_gradients: bool
    overlaps_gathers: bool
    overlaps_tensor: bool
    overlaps_pipeline: bool
    reduces_each: bool
    norm_bytes: Amount
    attention_casts: Count
    ffn_casts: Count
    gated_copies: Amount
    plain_copies: Amount
    score_bytes: Amount
    dropout_bytes: Amount
    logit_bytes: Amount
    loss_peak_bytes: Amount
    gathered_inputs: bool
    selective_cheap: bool
    balances_stages: bool
    dummy_gradients: bool
    narrow_routed_moments: bool
    reserved_share: Amount
    source: str
    step_unit: Amount = 0
    unfused_bytes: Amount = 2
    routed_split: RoutedSplit = "whole"
    folds_experts: bool = False
    ways: tuple[Way, ...] = ()
    full_sharding: str = "FSDP2"
    second_products: bool = False
    selective_attention: bool = False
    recompute_modules: tuple[str, ...] = ()
    gathers_context: bool = False
    row_scales: bool = False
    wide_weight_gradients: bool = False
    wide_embedding_moments: bool = False
    has_measured_peaks: bool = False
    wraps: Literal["", "blocks", "blocks and ends"] = ""
    version: str = ""
    """Version whose facts these are, as asked for; empty is the newest that is known."""


@cache
def load_engines() -> Mapping[str, Engine]:
    """Every engine of the catalog by its name."""
    return {name: _engine(name, row, "", None) for name, row in _rows().items()}


@cache
def _rows() -> dict[str, Any]:
    return read_shipped("engines.toml")


def _engine(name: str, row: dict[str, Any], version: str, year: int | None) -> Engine:
    """An engine of a version; where none is stated, of the one that was newest in a year."""
    facts = {key: value for key, value in row.items() if key != "before"}
    older = [past for past in row.get("before", ()) if _is_before(past, version, year)]
    # The newest bound first: an older one is more particular and is laid over it.
    for past in sorted(older, key=lambda past: past["year"], reverse=True):
        facts |= {key: value for key, value in past.items() if key not in ("version", "year")}
    return make_row(Engine, facts, where=name, file="engines.toml", name=name, version=version)


def compiled(engine: Engine) -> Engine:
    """The engine with a model that torch.compile has compiled: fewer passes over memory, and a host
    that is rarely the slowest. What it keeps is not counted otherwise."""
    return replace(engine, host="compiled") if engine.host == "eager" else engine


_KERNELS = {"flash": "flash2", "fused": "flash3", "flex": "flex", "unfused": "unfused"}
"""What a job asks for -> `Engine.attention`."""


_RECIPE_FACTS: Mapping[str, dict[str, Any]] = {
    "tensorwise": {"row_scales": False},
    "rowwise": {"row_scales": True},
    "mxfp8": {"row_scales": True},
}
"""Scales along a row are others than along a column, so every tensor is cast for both. MXFP8:
torchao 0.10, prototype/mx_formats/mx_linear.py, casts along dim 0 and dim 1."""


_STATE_FACTS: Mapping[str, dict[str, Any]] = {
    "bf16": {
        **dict.fromkeys(("weight_bytes", "sharded_bytes", "gradient_bytes", "reduce_bytes"), 2),
        "passing_bytes": 2,
        "cast_bytes": 0,
    },
}
"""MLX 0.32, python/mlx/optimizers/optimizers.py: Adam's `init_single` makes `m` and `v` with
`zeros_like(parameter)`, and `apply_single` casts its rate to the gradient's type: nothing is wide
beside bf16 parameters."""


def as_asked(
    engine: Engine,
    *,
    states: str = "auto",
    attention: str = "auto",
    fp8_recipe: str = "auto",
    async_tensor: bool = False,
    token_dispatcher: str = "auto",
    async_expert: bool = False,
    optimizer_in_backward: bool = False,
    is_compiled: bool = False,
) -> Engine:
    """The engine as a job asks for it: `auto` is what it does itself.

    Args:
        states: `auto`, or `bf16` for parameters, gradients and moments.
        attention: One of `choices.Attention`.
        fp8_recipe: One of `choices.Fp8Recipe`.
        async_tensor: Whether tensor parallelism's collectives hide behind its matrices.
        token_dispatcher: One of `choices.TokenDispatcher`.
        async_expert: Whether tokens cross to their experts behind another micro-batch.
        optimizer_in_backward: Whether gradients are freed as they come.
        is_compiled: Whether torch.compile compiles the model.
    """
    facts: dict[str, Any] = {
        **_STATE_FACTS.get(states, {}),
        **_RECIPE_FACTS.get(fp8_recipe, {}),
    }
    if attention in _KERNELS:
        facts["attention"] = _KERNELS[attention]
        facts["score_bytes"] = engine.unfused_bytes if attention == "unfused" else 0.0
        # Dropout of 0 keeps nothing: ATen dropout.cpp returns its input.
        facts["dropout_bytes"] = 0.0
    if optimizer_in_backward:
        facts["gradient_bytes"] = 0
    asked: dict[Way, bool] = {
        "one_copy_a_node": token_dispatcher == "deepep",
        "hides_exchange": async_expert,
    }
    facts["ways"] = (*engine.ways, *(way for way, is_asked in asked.items() if is_asked))
    found = replace(engine, **facts, overlaps_tensor=engine.overlaps_tensor or async_tensor)
    return compiled(found) if is_compiled else found


def _is_before(past: Mapping[str, Any], version: str, year: int | None) -> bool:
    if version:
        return "version" in past and is_before(version, past["version"])
    return year is not None and year < past["year"]


def find_engine(name: str, version: str = "", *, year: int | None = None) -> Engine:
    """The engine of a release.

    Args:
        version: The release, of a publication also one whose facts no job can ask for; empty is
            the newest that is known.
        year: Of a run whose version is not stated.

    >>> find_engine("fsdp1", "0.6.0").attention
    'flash1'
    """
    if not version and year is None:
        return load_engines()[name]
    return _engine(name, _rows()[name], version, year)
