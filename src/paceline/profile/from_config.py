"""A Hugging Face config.json as a `ModelProfile`: one row of families.toml for each family.

Parameters are exactly those of the class in transformers that trains the model; which class is in
the row. Buffers are no parameters, a tied output matrix counts once.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from paceline.catalog.load import read_shipped
from paceline.errors import JobError, Problem
from paceline.profile import count_encoder
from paceline.profile.count_gated import Traits, profile_gated, profile_latent
from paceline.profile.count_plain import profile_plain
from paceline.profile.fields import Fields
from paceline.profile.model import ModelProfile

_DECODER_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


class Family(NamedTuple):
    """How a `model_type` is counted."""

    profile: Callable[[Fields, int], ModelProfile]
    trains: str
    """The class of transformers whose parameters are counted: `...For` this."""

    run: Mapping[str, Any]
    """How our own runtime takes it: `run` of its row."""


_BY_ROW = {
    "gated": profile_gated,
    "latent": profile_latent,
    "plain": profile_plain,
    "masked": count_encoder.profile_masked,
}
_ALONE = {"t5": count_encoder.profile_t5, "vit": count_encoder.profile_vit}
"""Forms of one family, whose fields are in the code."""

_OF_ALL = {"form", "trains", "run", "split"}
_SIZES = {"hidden", "heads", "layers", "ffn", "written"}
_KEYS: Mapping[str, set[str]] = {
    "gated": _OF_ALL | {each.name for each in fields_of(Traits)},
    "latent": _OF_ALL | {each.name for each in fields_of(Traits)},
    "plain": _OF_ALL
    | _SIZES
    | {"ffn_default", "kv_heads", "kv_heads_default", "positions", "positions_default"}
    | {"qkv_bias", "output_bias", "ffn_bias", "tied", "has"},
    "masked": _OF_ALL | _SIZES | {"types", "head_bias"},
    "t5": _OF_ALL,
    "vit": _OF_ALL,
}
"""Form -> the keys of its rows."""


def _family(name: str, row: Mapping[str, Any]) -> Family:
    form, trains, run = row["form"], row.get("trains", "CausalLM"), row.get("run", {})
    if unknown := sorted(set(row) - _KEYS[form]):
        raise ValueError(f"families.toml: {name}: a row of form {form} has no {unknown[0]}")
    if form in _ALONE:
        return Family(partial(_ALONE[form], name=name), trains, run)
    return Family(partial(_BY_ROW[form], name=name, row=row), trains, run)


FAMILIES: Mapping[str, Family] = {
    name: _family(name, row) for name, row in read_shipped("families.toml").items() if "form" in row
}


def profile_config(
    config: Mapping[str, Any],
    seq_len: int,
    *,
    source: str = "config.json",
    where: str = "model.hf_config",
    name: str | None = None,
) -> ModelProfile:
    """Costs of the model that a config.json describes, on samples of `seq_len` tokens.

    Args:
        seq_len: Tokens in a sample; a vision transformer takes its own.
        source: The file's name for messages.
        where: Its place in the job for messages.
        name: Of the profile; left out, the family's.

    Raises:
        JobError: The family is unknown (`M003`), a field is missing or absurd (`M004`), or heads
            do not divide (`M005`, `M006`).

    >>> profile_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    ...     "vocab_size": 50257}, 1024).num_parameters
    124439808
    """
    kind = _kind_of(config)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise JobError(_unknown_family(config, source, where))
    fields = Fields(config, source=source, where=where)
    profile = family.profile(fields, seq_len)
    fields.check()
    return profile if name is None else replace(profile, name=name)


def _unknown_family(config: Mapping[str, Any], source: str, where: str) -> Problem:
    kind = _kind_of(config)
    near = difflib.get_close_matches(str(kind).lower(), FAMILIES, n=2, cutoff=0.5)
    here = [name for name in _DECODER_FIELDS if config.get(name) is not None]
    missing = [name for name in _DECODER_FIELDS if name not in here]
    nearest = f"nearest are {' and '.join(near)}; " if near else ""
    if isinstance(config.get("text_config"), dict):
        fix = "it holds a language model in text_config: save that as a config.json of its own"
    else:
        fix = f"a decoder needs {', '.join(_DECODER_FIELDS)}; " + (
            f"here {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            if missing
            else "all are here, so set model_type to llama if it is built alike"
        )
    return Problem(
        code="M003",
        what=f"{source} is of model_type {kind!r}; {nearest}known are {', '.join(FAMILIES)}",
        where=where,
        fix=f"{fix}; or use model.factory with your own module",
    )


def _kind_of(config: Mapping[str, Any]) -> Any:
    """The family's name as transformers writes it: in lower case."""
    kind = config.get("model_type")
    return kind.lower() if isinstance(kind, str) else kind
