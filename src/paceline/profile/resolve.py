"""The job's model: its profile for planning, and its `DecoderShape` where the runtime can run it.

A job gives its model by sizes, by the name of a published model, by a config.json, by pretrained
weights, by a factory of its own or by a number of parameters.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.catalog.configs import find_published
from paceline.errors import JobError, Problem
from paceline.job import DecoderSpec, Job
from paceline.job.adapters import check_start
from paceline.job.data_rules import is_prepared, objective_of
from paceline.job.hf_config import has_hf_config, load_hf_config
from paceline.job.pretrained import check_unused, find_pretrained, loads_weights
from paceline.profile.adapter import beside_experts, cannot_adapt, with_adapter
from paceline.profile.decoder import profile_decoder
from paceline.profile.fields import divisors, nearest
from paceline.profile.from_config import profile_config
from paceline.profile.hf_names import hf_config_of
from paceline.profile.model import ModelProfile, as_classifier
from paceline.profile.module import ModuleFacts, profile_module
from paceline.profile.runnable import (
    is_built_in,
    last_position,
    left_out,
    packs,
    reasons_against_running,
    shape_of_config,
)
from paceline.profile.shape import DecoderShape
from paceline.profile.size import assumed_of_size, shape_of_size


class AskedConfig(NamedTuple):
    """The config.json of a job's model."""

    config: Mapping[str, Any]
    source: str
    """The file, or the published model's name."""

    where: str
    name: str | None
    """Name of a published model."""


def resolve_profile(job: Job, facts: ModuleFacts | None = None) -> ModelProfile:
    """What the job's model costs, with its adapters when only those are trained.

    Args:
        facts: What a helper process counted of the module, for a job with `model.factory`.

    Raises:
        JobError: The model is unknown, its config.json unusable, or sizes do not go together.
    """
    model, seq_len = job.spec.model, job.spec.data.seq_len
    family = None
    if model.factory is not None:
        assert facts is not None, "a model.factory is measured before it is planned"
        profile = profile_module(facts, seq_len, name=model.factory)
        family = str(facts.config.get("model_type")) if facts.config else None
    elif (asked := _config(job)) is not None:
        family = str(asked.config.get("model_type"))
        profile = _profile_config(asked, seq_len)
        if objective_of(job.spec) == "classification":
            profile = as_classifier(profile, len(job.spec.data.labels or ()))
        profile = replace(profile, is_built_in=resolve_decoder(job) is not None)
    else:
        shape = resolve_decoder(job)
        assert shape is not None, "only a config.json or a factory may be of another family"
        size = model.size
        name = "decoder" if size is None else f"{size / 1e9:.4g}B"
        assumed = () if size is None else tuple(assumed_of_size(size, shape))
        profile = profile_decoder(shape, seq_len, name=name, assumed=assumed)
    adapter = job.spec.train.adapter
    return with_adapter(profile, adapter, family=family, where=job.where("train.adapter"))


def resolve_decoder(job: Job) -> DecoderShape | None:
    """The built-in decoder's sizes, all resolved; None for a model that it cannot be.

    Such a model is built by transformers from `resolve_config`, or by its factory.

    Raises:
        JobError: The preset is unknown, the config.json unusable, or sizes do not go together.
    """
    model = job.spec.model
    if model.decoder is not None:
        return _shape_of_spec(job, model.decoder)
    if model.size is not None:
        return shape_of_size(model.size, where=job.where("model.size"))
    if model.factory is not None:
        return None
    asked = _config(job)
    assert asked is not None, "every other model has a config"
    _profile_config(asked, 1)
    if objective_of(job.spec) == "classification":
        return None
    if not is_built_in(asked.config) or (loads_weights(job) and _lacks(job, asked.config)):
        return None
    return shape_of_config(asked.config)


def resolve_config(job: Job) -> AskedConfig | None:
    """The config.json of a job's model, its own or a published one's; None when it has none.

    Raises:
        JobError: It is unknown or cannot be read.
    """
    return None if job.spec.model.factory is not None else _config(job)


def written_config(job: Job) -> Mapping[str, Any] | None:
    """The config.json to write beside the model's weights, as transformers reads it; None for code
    of the reader's own. A published model's has only sizes in it, so the built-in decoder's is
    written in full."""
    asked = resolve_config(job)
    shape = resolve_decoder(job) if asked is None or asked.name is not None else None
    if shape is not None:
        return hf_config_of(shape, job.spec.data.seq_len)
    return None if asked is None else asked.config


def needs_transformers(job: Job) -> bool:
    """Whether only transformers can build the job's model."""
    return job.spec.model.factory is None and resolve_decoder(job) is None


def check_runnable(job: Job) -> Iterator[Problem]:
    """What keeps the built-in trainer from training this model as the job asks for it.

    Your own program builds and trains what it likes.
    """
    yield from check_model(job)
    yield from check_asked(job)


def check_model(job: Job) -> Iterator[Problem]:
    """`R013`, models that the built-in trainer lacks. They are planned for all the same."""
    if job.spec.program is not None:
        return
    asked = resolve_config(job)
    if asked is None:
        if objective_of(job.spec) == "classification":
            yield Problem(
                code="R013",
                what="classification takes its head from transformers, and the built-in decoder "
                "is none of its models",
                where=job.where("model"),
                fix="name the model by model.pretrained or model.hf_config",
            )
        return
    _profile_config(asked, 1)
    for reason in reasons_against_running(asked.config):
        yield Problem(
            code="R013",
            what=f"Paceline's own runtime cannot train {asked.source}: {reason}",
            where=asked.where,
            fix="`paceline plan` works for it; to train it here, give model.factory and program "
            "with your own code",
        )


def check_positions(job: Job) -> Iterator[Problem]:
    """`M014`, samples longer than the model has positions, whichever engine trains it. Rotary ones
    end where our own runtime starts from trained weights, which know no others."""
    asked = resolve_config(job)
    if asked is None:
        return
    _profile_config(asked, 1)
    seq_len, last = job.spec.data.seq_len, last_position(asked.config)
    is_ours = job.spec.engine == "paceline" and job.spec.program is None
    if last is None and is_ours and loads_weights(job):
        last = asked.config.get("max_position_embeddings")
    if isinstance(last, int) and seq_len > last:
        yield Problem(
            code="M014",
            what=f"data.seq_len is {seq_len}, and {asked.source} has {last} positions",
            where=job.where("data.seq_len"),
            fix=f"set data.seq_len to {last} or less; for longer samples give a config.json "
            "(model.hf_config) with more positions, and with their scaling where they are rotary",
        )


def check_asked(job: Job) -> Iterator[Problem]:
    """What no plan for the built-in trainer may ask for: weights that would not be used, samples
    beyond the model's positions, adapters and compiled blocks that it cannot train."""
    if job.spec.program is not None:
        return
    yield from check_unused(job)
    yield from check_positions(job)
    asked = resolve_config(job)
    if asked is not None and loads_weights(job):
        yield from _check_pretrained(job, asked.config)
    if job.spec.model.factory is None:  # what is inside of one is not known, and M009 in the plan
        yield from _check_adapter(job)
    if objective_of(job.spec) != "next_token":
        yield from check_packing(job)


def check_packing(job: Job, *, is_text: bool = False) -> Iterator[Problem]:
    """What keeps documents that are packed into one sample from being kept apart.

    Args:
        is_text: Whether all of its rows are plain texts, which can be cut into windows instead.
    """
    windows = ", or set data.pack: windows" if is_text else ""
    if job.spec.train.compile:
        yield Problem(
            code="R013",
            what="train.compile and packed documents do not go together yet: documents end "
            "elsewhere in every batch, and blocks would be compiled again for each",
            where=job.where("train.compile"),
            fix=f"leave train.compile out{windows}",
        )
    asked = resolve_config(job)
    if asked is not None and not packs(asked.config):
        kind = asked.config.get("model_type")
        yield Problem(
            code="R013",
            what=f"documents in one sample cannot be kept apart in a {kind} model, whose attention "
            "or positions cannot be set",
            where=job.where("data.pack"),
            fix=f"take another model{windows}",
        )


def _check_adapter(job: Job) -> Iterator[Problem]:
    spec = job.spec.train.adapter
    if spec is None:
        return
    profile = resolve_profile(job)
    for what in cannot_adapt(profile, spec, family=_family(job)):
        yield Problem(
            code="R013",
            what=f"Paceline's own trainer has no {spec.kind} adapters for this model: {what}",
            where=job.where("train.adapter.kind"),
            fix="set train.adapter.kind to lora"
            + (" or train.adapter.dropout to 0" if spec.kind == "dora" else ""),
        )
    if job.spec.train.precision == "fp8":
        yield Problem(
            code="R013",
            what="linears with an adapter are not multiplied in float8",
            where=job.where("train.precision"),
            fix="set train.precision to bf16, or leave train.adapter out",
        )
    adapter = profile.adapter
    if adapter is not None:
        yield from check_start(job, adapter.num_parameters)
    if adapter is not None and (names := beside_experts(adapter)):
        yield Problem(
            code="R013",
            what="Paceline's own trainer has no adapters beside routed experts and their router "
            f"({', '.join(names)})",
            where=job.where("train.adapter.targets"),
            fix="set train.adapter.targets to attention, or name the other linears",
        )


def _family(job: Job) -> str | None:
    """`model_type` of the job's config.json, where it has one."""
    asked = resolve_config(job)
    return None if asked is None else str(asked.config.get("model_type"))


def left_out_of(job: Job) -> tuple[str, ...]:
    """What the model asks for that the built-in decoder does not do, one phrase each. Pretrained
    weights need all of it: transformers builds their model then, and nothing is left out."""
    asked = resolve_config(job)
    return () if asked is None or loads_weights(job) else tuple(left_out(asked.config))


def _lacks(job: Job, config: Mapping[str, Any]) -> bool:
    """Whether the built-in decoder would compute something else from the same weights."""
    return any(left_out(config, job.spec.data.seq_len))


def _check_pretrained(job: Job, config: Mapping[str, Any]) -> Iterator[Problem]:
    """What would make trained weights compute nonsense."""
    vocab = config.get("vocab_size")
    if vocab != 256 and not is_prepared(job):
        yield Problem(
            code="R013",
            what=f"the model knows {vocab} tokens of its tokenizer, and model.tokenizer bytes "
            "would give it bytes as tokens",
            where=job.where("model.tokenizer"),
            fix="leave model.tokenizer out to take the model's own, or give its folder",
        )


def _config(job: Job) -> AskedConfig | None:
    """The fields of the model's config.json, with the job's classes; None without."""
    asked = _own_config(job)
    if asked is None or objective_of(job.spec) != "classification":
        return asked
    labels = [str(label) for label in job.spec.data.labels or ()]
    classes = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }
    named = [
        re.sub(r"(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", str(name))
        for name in asked.config.get("architectures") or ()
    ]
    return asked._replace(config={**asked.config, **classes, "architectures": named})


def _own_config(job: Job) -> AskedConfig | None:
    """As it stands in the file, or is published."""
    pretrained = find_pretrained(job)
    if pretrained is not None:
        source = str(pretrained.folder / "config.json")
        return AskedConfig(pretrained.config, source, job.where("model.pretrained"), None)
    where = job.where("model.hf_config")
    if has_hf_config(job):
        read = load_hf_config(job)
        return AskedConfig(read.values, read.source, where, None)
    name = job.spec.model.hf_config
    if name is not None and ("/" in name or name.endswith(".json")):
        load_hf_config(job)  # raises that there is no such file
    if name is None:
        name, where = job.spec.model.preset, job.where("model.preset")
    if name is None:
        return None
    published = find_published(name, where=where)
    return AskedConfig(published.config, published.name, where, published.name)


def _profile_config(asked: AskedConfig, seq_len: int) -> ModelProfile:
    return profile_config(
        asked.config, seq_len, source=asked.source, where=asked.where, name=asked.name
    )


def _shape_of_spec(job: Job, spec: DecoderSpec) -> DecoderShape:
    shape = DecoderShape(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.heads if spec.kv_heads == "auto" else spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        ffn=ffn_width(spec.hidden) if spec.ffn == "auto" else spec.ffn,
        vocab=spec.vocab,
        tied_embeddings=spec.tied_embeddings,
    )
    JobError.raise_for(_check_sizes(shape, job))
    return shape


def ffn_width(hidden: int) -> int:
    """Width of the feed-forward layer when none is given: 8/3 of hidden, up to a multiple of 32.

    Two thirds of the usual 4 x hidden, since SwiGLU has three matrices instead of two.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, section 3.

    >>> ffn_width(128)
    352
    """
    return -(-8 * hidden // (3 * 32)) * 32


def _check_sizes(shape: DecoderShape, job: Job) -> Iterator[Problem]:
    """Sizes that cannot be built."""
    hidden, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
    if hidden % heads:
        yield Problem(
            code="M005",
            what=f"heads {heads} does not divide hidden {hidden}: "
            f"a head would be {hidden / heads:.2f} wide",
            where=job.where("model.decoder.heads"),
            fix=f"set heads to {nearest(heads, divisors(hidden))}",
        )
    elif shape.head_dim % 2:
        even = [n for n in divisors(hidden) if hidden // n % 2 == 0]
        yield Problem(
            code="M007",
            what=f"a head is {shape.head_dim} wide (hidden {hidden}, heads {heads}); rotary "
            "positions turn pairs, so it must be even",
            where=job.where("model.decoder.heads"),
            fix=f"set heads to {nearest(heads, even)}" if even else "make hidden an even number",
        )
    if heads % kv_heads:
        yield Problem(
            code="M006",
            what=f"kv_heads {kv_heads} does not divide heads {heads}: every key and value head "
            "serves the same number of heads",
            where=job.where("model.decoder.kv_heads"),
            fix=f"set kv_heads to {nearest(kv_heads, divisors(heads))}",
        )
