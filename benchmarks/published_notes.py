"""What a row of `published_calibration.csv` says in words: kernels, types, schedule, optimizer.

Only what is stated: a row that says nothing is left to the facts of its engine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OPTIMIZERS: tuple[tuple[str, str], ...] = (
    (r"8.?bit", "adamw-8bit"),
    (r"muon", "muon"),
    (r"adafactor", "adafactor"),
    (r"\bsgd", "sgd"),
)
_ATTENTIONS: tuple[tuple[str, str], ...] = (
    (r"triton|flash_?attn=?v?1|fa1\b", "flash1"),
    (r"fa3|flash_?(attn|attention)?[-_ ]?3|cudnn", "flash3"),
    (r"fa2|flash_?(attn|attention)?[-_ ]?2|sdpa|xformers|mem.?efficient", "flash2"),
    (r"eager|unfused|\bmath\b|=torch\b|=none\b", "unfused"),
)
_SCHEDULES: tuple[tuple[str, tuple[str, int | None] | None], ...] = (
    (r"zb.?v|zero.?bubble.?v", ("zero-bubble", 2)),
    (r"zb.?(2p|h2)|zero.?bubble.?(2p|h2)", None),
    (r"zb|zero.?bubble", ("zero-bubble", None)),
    (r"dual.?pipe.?v", ("dualpipe-v", None)),
    (r"dual.?pipe", None),
    (r"gpipe|afab", ("gpipe", None)),
    (r"interleaved|vpp|looped", ("interleaved", None)),
    (r"1f1b", ("1f1b", None)),
)
"""Part of a schedule's name -> ours and its virtual stages; None is one that no engine of the
catalog has: ZB-2p and ZB-H2 hold twice as many micro-batches, DualPipe two copies of the model."""

_ONE_COPY_A_NODE = (
    r"deep_?ep|hybrid-?ep"
    r"|deepseek-v3 [hb]\d00(?!.*tokendrop).*container="
    r"|qwen3-30b-a3b h100.*container=26\.0[46]"
    r"|qwen3-235b-a22b h100.*container=26\.02;"
)
"""Rows whose tokens cross to each node once: those that name DeepEP or HybridEP, and recipes of
Megatron-Bridge that set it where experts are on several nodes. Source: scripts/performance of its
938e8a2 (25.09: `enable_deepep` on H100, not with token drop) and of v0.2.0, v0.3.1, v0.4.0, v0.4.2,
v0.5.0 (configs/*/..._base_configs.py, `moe_flex_dispatcher_backend`; not set is `alltoall`)."""

_HIDES_EXCHANGE = (
    r"deepseek-v3 h100.*container=25|qwen3-235b-a22b h100.*container=(25\.11|26)"
    r"|qwen3-235b-a22b b200.*container=25\.11|qwen3-30b-a3b h100.*container=25\.11"
    r"|deepseek-v3 b200.*mla_up_proj\+mlp;.*@v0\.4\.2"
    r"|gpt-oss-120b gb200.*container=26\.0[246].*bf16_v2"
    r"| g?b[23]00.*_fp8_mx_v\d@v0\.5\.[01]"
)
"""Recipes of Megatron-Bridge that send one micro-batch's tokens while another one is computed.
Source: the same files, `moe_a2a_overlap=True`; 25.09: setup_experiment.py, `a2a_overlap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """None, or the usual value, is not stated."""

    optimizer: str = "adamw"
    is_paged: bool = False
    """The optimizer's state is in memory that the driver moves, which no allocator counts."""

    optimizer_in_backward: bool = False
    """Gradients are freed as each parameter is updated in the backward pass."""

    attention: str | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    unknown_schedule: str | None = None
    """A schedule that is stated, and that no engine of the catalog has."""

    parameter_bytes: int | None = None
    """Of the trained parameters themselves: 2 without a float32 copy, 4."""

    reduce_bytes: int | None = None
    context_bytes: float | None = None
    """What the driver takes of the device before any tensor."""

    row_scales: bool = False
    """fp8 with a scale for each row."""

    wide_weight_gradients: bool = False
    """Gradients of matrices stay in 16 bits beside fp8."""

    overlaps_tensor: bool = False
    """Tensor parallelism's collectives hide behind its products (torchtitan's async TP)."""

    one_copy_a_node: bool = False
    """A token crosses to each node with some of its experts once."""

    hides_exchange: bool = False
    """Tokens cross while another micro-batch is computed."""

    recompute_every: int = 1
    no_logits: bool = False
    """The loss is computed in chunks and keeps no logits (Liger's, Cut Cross-Entropy)."""


def stated_in(row: Mapping[str, str]) -> Stated:
    """What the row's notes and cells state."""
    notes, recompute = row["notes"], row["activation_ckpt"].lower()
    schedule, virtual, unknown = _schedule(notes)
    recipe = f"{row['model_name']} {row['accelerator']} {notes}"
    every = re.search(
        r"every[ _]?(\d+)|(?:layers?|freq\w*)[ =_](\d+)|select\w*[ (]+(\d+)", recompute
    )
    return Stated(
        optimizer=_optimizer(notes),
        is_paged=bool(re.search(r"paged", notes, re.IGNORECASE)),
        optimizer_in_backward=bool(
            re.search(r"optimizer_in_bwd(=true|=1|\b(?!=))|optimizer in backward", notes, re.I)
        ),
        attention=_attention(notes),
        schedule=schedule,
        virtual_stages=virtual,
        unknown_schedule=unknown,
        parameter_bytes=_parameter_bytes(row["precision"], notes),
        reduce_bytes=_reduce_bytes(notes),
        context_bytes=_context_bytes(notes),
        row_scales="row" in _recipe(notes),
        wide_weight_gradients="gw_hp" in _recipe(notes),
        overlaps_tensor=bool(
            re.search(
                r"async[_ -]?(tp\b|tensor[_ -]parallel\w*)(?! ?[=:] ?(0|false|no|off))", notes, re.I
            )
        ),
        one_copy_a_node=bool(re.search(_ONE_COPY_A_NODE, recipe, re.IGNORECASE)),
        hides_exchange=bool(re.search(_HIDES_EXCHANGE, recipe, re.IGNORECASE)),
        recompute_every=int(next(filter(None, every.groups()))) if every else 1,
        no_logits=bool(re.search(r"liger|fused.?linear.?c|cut.?cross|\bcce\b", notes, re.I)),
    )


def _tag(name: str, notes: str) -> str:
    found = re.search(rf"\b(?:{name})=([^;,]+)", notes, re.IGNORECASE)
    return found[1].strip().lower() if found else ""


def _optimizer(notes: str) -> str:
    text = _tag("optimizer|optim", notes)
    if not text:
        named = re.search(r"adamw?.?8.?bit|8.?bit.{0,6}adamw?|bnb.?8bit", notes, re.IGNORECASE)
        text = named[0].lower() if named else ""
    return next((ours for part, ours in _OPTIMIZERS if re.search(part, text)), "adamw")


def _attention(notes: str) -> str | None:
    if "flash_attn=0" in notes:
        return "unfused"
    text = _tag("attn|attention|attn_impl", notes)
    return next((k for part, k in _ATTENTIONS if text and re.search(part, f"={text}")), None)


def _schedule(notes: str) -> tuple[str | None, int | None, str | None]:
    text = _tag("schedule|pp_schedule", notes)
    for part, ours in _SCHEDULES:
        if text and re.search(part, text):
            return (None, None, text) if ours is None else (*ours, None)
    return None, None, None


def _parameter_bytes(precision: str, notes: str) -> int | None:
    """Of FSDP, `PURE` is about what is multiplied and reduced: its shards stay float32."""
    text = _tag(r"param(?:eter)?s?(?:_d?type)?|weights|master_weights|param_dtype", notes)
    if re.search(r"bf16|fp16|float16|16.?bit", text):
        return 2
    if re.search(r"fp32|float32", text):
        return 4
    if re.search(r"(bf|fp)16-true|pure[ _-]?bf16", f"{precision} {notes}", re.IGNORECASE):
        return 2
    return 4 if re.search(r"(bf|fp)16-mixed", f"{precision} {notes}") else None


def _context_bytes(notes: str) -> float | None:
    stated = re.search(r"CUDA context \(~?([\d.]+) ?GB\)", notes)
    return float(stated[1]) * 1e9 if stated else None


def _recipe(notes: str) -> str:
    """Of fp8's scales, in torchao's names: tensorwise, rowwise, rowwise_with_gw_hp."""
    return _tag("prec_recipe|fp8_recipe|float8_recipe|float8|recipe_name|recipe", notes)


def _reduce_bytes(notes: str) -> int | None:
    """Of Composer's FSDP: distributed/mosaic_parallelism.py, get_mixed_precision."""
    kind = _tag("fsdp_mixed_precision|mixed_precision", notes)
    if kind in ("pure", "default", "full"):
        return 2 if kind == "pure" else 4
    text = _tag("reduce_dtype|grad_reduce", notes)
    if not text:
        return None
    return 2 if re.search(r"bf16|fp16|16", text) else 4
