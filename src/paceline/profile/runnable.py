"""Which models of a config.json Paceline's own runtime can train, and as what.

Llama, Mistral and Qwen2 are the built-in decoder, up to sizes and a bias on three projections. Any
other causal language model that is planned for is built by transformers. What is neither is planned
for other engines, and refused by `paceline run` only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.profile.from_config import FAMILIES
from paceline.profile.shape import DecoderShape
from paceline.profile.ways import HUGGING_FACE

BUILT_IN = ("llama", "mistral", "qwen2")
"""`model_type`s that are the built-in decoder up to sizes."""

_CAUSAL = ("CausalLM", "GPT2LMHeadModel")
"""Classes of transformers that predict the next token: `AutoModelForCausalLM` builds these."""

SPLIT = frozenset(FAMILIES) & frozenset(HUGGING_FACE)
"""`model_type`s whose matrices and stages our runtime knows how to split. The stages, one after the
other, give the same bits as the model: tests/runtime/test_pipeline.py. A family that looks at its
embeddings again later would not."""

_BYTES = 256
"""Values of a byte, which is what the built-in trainer reads as tokens."""

_NORM_EPS = 1e-6
"""Used when `rms_norm_eps` is left out. Source: LlamaConfig in transformers."""

_ROPE_THETA = 10_000.0
"""Used when `rope_theta` is left out. Source: LlamaConfig in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Which ways of splitting our own runtime has for one model, besides data ranks."""

    tensor: bool = True
    pipeline: bool = True
    expert: bool = True
    context_kinds: tuple[Literal["ring", "ulysses"], ...] = ("ring", "ulysses")


def splits_of(config: Mapping[str, Any], seq_len: int, *, built_in: bool | None = None) -> Splits:
    """How our own runtime can split a model of a config.json.

    Args:
        config: Fields that `profile_config` found good.
        built_in: Whether it is the built-in decoder; left out, where it can be.

    >>> splits_of({"model_type": "bloom"}, 512)
    Splits(tensor=False, pipeline=False, expert=False, context_kinds=())
    """
    kind = _kind(config)
    if is_built_in(config) if built_in is None else built_in:
        return Splits(expert=False)
    run = FAMILIES[kind].run if kind in FAMILIES else {}
    name, default = run.get("dropout", ("attention_dropout", 0.0))
    dropout = config.get(name)
    window = config.get("sliding_window")
    has_window = isinstance(window, int) and 0 < window < seq_len
    is_plain = not (default if dropout is None else dropout) and not has_window
    contexts: tuple[Literal["ring", "ulysses"], ...] = ()
    if kind in SPLIT and "one_attention" not in run:
        contexts = ("ring", "ulysses") if is_plain and "capped" not in run else ("ulysses",)
    return Splits(
        tensor=kind in SPLIT and not (kind == "falcon" and config.get("alibi")),
        pipeline=kind in SPLIT,
        expert="shares_experts" in run,
        context_kinds=contexts,
    )


def reasons_against_running(config: Mapping[str, Any]) -> Iterator[str]:
    """Why the built-in trainer cannot train this model, one sentence each; none when it can."""
    kind = _kind(config)
    trains = FAMILIES[kind].trains
    if trains not in _CAUSAL:
        yield f"{kind} computes {trains}, and the built-in trainer predicts the next token"
        return
    if config.get("quantization_config"):
        yield "quantization_config is set; the runtime trains parameters in float32"
    if kind in BUILT_IN and shape_of_config(config).head_dim % 2:
        head_dim = shape_of_config(config).head_dim
        yield f"a head is {head_dim} wide; rotary positions turn pairs, so it must be even"
    vocab = config.get("vocab_size")
    if isinstance(vocab, int) and vocab < _BYTES:
        yield f"vocab_size is {vocab}, and the built-in trainer reads bytes, of {_BYTES} values"


def last_position(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sample that the model has positions for; None where they do not end.

    >>> last_position({"model_type": "gpt2"}), last_position({"model_type": "llama"})
    (1024, None)
    """
    run = FAMILIES[_kind(config)].run
    given = (config[name] for name in run.get("ends", ()) if config.get(name))
    positions = next(given, run.get("ends_default"))
    return None if positions is None else positions - run.get("ends_before", 0)


def packs(config: Mapping[str, Any]) -> bool:
    """Whether documents in one sample can be kept apart: attention can be set, and positions
    restart. tests/runtime/test_packed.py has four of these families; the others have the same
    attention function and position ids.

    >>> packs({"model_type": "bloom"}), packs({"model_type": "gpt2"})
    (False, True)
    """
    kind = _kind(config)
    return kind in BUILT_IN or (kind in SPLIT and "one_attention" not in FAMILIES[kind].run)


def is_built_in(config: Mapping[str, Any]) -> bool:
    """Whether the built-in decoder can be this model; otherwise transformers builds it."""
    if _kind(config) not in BUILT_IN or config.get("quantization_config"):
        return False
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        return False
    if config.get("attention_bias") or config.get("mlp_bias"):
        return False
    return shape_of_config(config).head_dim % 2 == 0


def shape_of_config(config: Mapping[str, Any]) -> DecoderShape:
    """The built-in decoder's sizes from fields that `profile_config` found good."""
    kind = _kind(config)
    heads = config["num_attention_heads"]
    rope = _rope(config)
    return DecoderShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or (8 if kind == "mistral" else heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        rope_theta=_number(config.get("rope_theta") or rope.get("rope_theta"), _ROPE_THETA),
        norm_eps=_number(config.get("rms_norm_eps"), _NORM_EPS),
    )


def left_out(config: Mapping[str, Any], seq_len: int | None = None) -> Iterator[str]:
    """What a model asks for that the built-in decoder does not do, one phrase each; with `seq_len`,
    what changes samples of that length.

    None of it changes the parameters. A model that transformers builds has nothing left out.
    """
    if not is_built_in(config):
        return
    rope, scaling = _rope(config), config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kind = scaling.get("rope_type") or scaling.get("type") or rope.get("rope_type") or "default"
    if kind != "default":
        yield f"scaling of rotary positions ({kind})"
    window = config.get("sliding_window")
    is_used = config.get("use_sliding_window", _kind(config) == "mistral")
    if window and is_used and (seq_len is None or window < seq_len):
        yield f"sliding window of {window} tokens"
    if config.get("attention_dropout"):
        yield f"attention dropout of {config['attention_dropout']}"


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type")).lower()


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where transformers 5 writes rotary positions."""
    rope = config.get("rope_parameters")
    return rope if isinstance(rope, Mapping) else {}


def _number(value: object, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else default  # type: ignore[arg-type, operator]
