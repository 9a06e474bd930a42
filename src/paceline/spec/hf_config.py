"""Read a Hugging Face `config.json` of the Llama family into plain sizes.

Llama, Mistral and Qwen2 are the same decoder up to sizes and a bias on three projections. What
changes the parameters and cannot be built is refused; what only changes how positions or
distances are treated is handed back in `left_out`, to be shown.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import JobError, Problem
from paceline.spec.load import Job

_FAMILY = ("llama", "mistral", "qwen2")

_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)

_NORM_EPS = 1e-6
"""Used when `rms_norm_eps` is left out. Source: LlamaConfig in transformers."""

_ROPE_THETA = 10_000.0
"""Used when `rope_theta` is left out. Source: LlamaConfig in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """Sizes of a decoder as a config.json states them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    """None when left out: hidden / heads."""

    ffn: int
    vocab: int
    tied_embeddings: bool
    qkv_bias: bool
    rope_theta: float
    norm_eps: float

    left_out: tuple[str, ...]
    """What the file asks for that the built-in decoder does not do, one phrase each."""


def load_hf_config(job: Job) -> HfConfig:
    """The config.json that `model.hf_config` of a job names, relative to the job file.

    Raises:
        JobError: It cannot be read, is of another family, or a field is missing or unsupported.
    """
    name = job.spec.model.hf_config
    assert name is not None, "the job names a config.json"
    where = job.where("model.hf_config")
    path = job.folder / name
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(
            Problem(
                code="M002",
                what=f"{path} cannot be read: {reason}",
                where=where,
                fix="give the path of a config.json, relative to the job file; a published model "
                "by name is model.preset",
            )
        ) from None
    return parse_hf_config(text, source=str(path), where=where)


def parse_hf_config(text: str, *, source: str, where: str) -> HfConfig:
    """The same from text; `source` names the file and `where` its place in the job."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        values = f"{error.msg}, line {error.lineno} column {error.colno}"
    if not isinstance(values, dict):
        what = values if isinstance(values, str) else f"it holds a {type(values).__name__}"
        raise JobError(
            Problem(
                code="M002",
                what=f"{source} is not a JSON object: {what}",
                where=where,
                fix="give a config.json as Hugging Face writes it",
            )
        )
    problems = list(_check(values, source, where))
    if problems:
        raise JobError(*problems)
    return _config(values)


def _check(values: Mapping[str, Any], source: str, where: str) -> Iterator[Problem]:
    kind = values.get("model_type")
    if kind not in _FAMILY:
        missing = [name for name in _NEEDED if name not in values]
        yield Problem(
            code="M003",
            what=f"{source} is of model_type {kind!r}; known are {', '.join(_FAMILY)}",
            where=where,
            fix=f"the decoder needs {', '.join(_NEEDED)}"
            + (f"; here {', '.join(missing)} is missing" if missing else ", which are all here")
            + ". If it is the same architecture, set model_type to llama; else use model.factory",
        )
        return
    for name in _NEEDED:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            yield Problem(
                code="M004",
                what=f"{source} says {name} is {value!r}"
                if name in values
                else f"{source} has no {name}",
                where=where,
                fix=f"write {name} as a whole number above 0",
            )
    for name, wrong in _unsupported(values):
        yield Problem(
            code="M004",
            what=f"{source} says {name} is {values[name]!r}; {wrong}",
            where=where,
            fix="use model.factory with your own module, or change the field",
        )


def _unsupported(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields that would change the parameters or the feed-forward."""
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        yield "hidden_act", "the built-in decoder computes SwiGLU (silu)"
    if values.get("attention_bias"):
        yield "attention_bias", "the built-in decoder has no bias on the attention's output"
    if values.get("mlp_bias"):
        yield "mlp_bias", "the built-in decoder has no bias in the feed-forward"
    if values.get("quantization_config"):
        yield "quantization_config", "parameters are trained in float32"


def _config(values: Mapping[str, Any]) -> HfConfig:
    rope = values.get("rope_parameters") or {}  # where transformers 5 writes them
    return HfConfig(
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        heads=values["num_attention_heads"],
        kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_dim=values.get("head_dim"),
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=values["model_type"] == "qwen2",
        rope_theta=float(values.get("rope_theta") or rope.get("rope_theta") or _ROPE_THETA),
        norm_eps=float(values.get("rms_norm_eps", _NORM_EPS)),
        left_out=tuple(_left_out(values, rope)),
    )


def _left_out(values: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[str]:
    scaling = values.get("rope_scaling") or {}
    scaling_kind = (
        scaling.get("rope_type") or scaling.get("type") or rope.get("rope_type") or "default"
    )
    if scaling_kind != "default":
        yield f"scaling of rotary positions ({scaling_kind})"
    window = values.get("sliding_window")
    if window and values.get("use_sliding_window", values["model_type"] == "mistral"):
        yield f"sliding window of {window} tokens"
    if values.get("attention_dropout"):
        yield f"attention dropout of {values['attention_dropout']}"
