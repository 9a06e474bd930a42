"""A case small enough for a few ranks: every way of splitting is kept, at degree 2, while it fits.

The code that is run is the job's. What becomes smaller are numbers: ranks on an axis, blocks,
widths, the vocabulary, the batch. Heads keep their grouping, experts their routing, a pipeline its
schedule; every size stays divisible by what splits it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from paceline.check.verify.runs import runs_of
from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.errors import JobError, PacelineError
from paceline.estimate import case_of, stage_memory
from paceline.job import Job
from paceline.job.data_rules import objective_of
from paceline.job.load import dump_job
from paceline.parallel.layout import Layout
from paceline.parallel.stages import num_stages
from paceline.plan import Plan
from paceline.profile import DecoderShape, ModelProfile, profile_config, resolve_config
from paceline.profile.decoder import profile_decoder
from paceline.record.verification import Case
from paceline.units import counted

MOST_RANKS = 4
"""Ranks that are started when nobody says how many. A guess: enough for two axes of two, and a
machine with two cores runs them in half a minute."""

_HEAD_DIM, _MOST_HIDDEN, _VOCAB, _SEQ_LEN = 16, 64, 256, 32
_MOST_EXPERTS = 4


@dataclass(frozen=True, slots=True)
class _Small:
    """A layout, and what became of the one that was planned."""

    layout: Layout
    notes: tuple[str, ...]


def small_case(
    job: Job,
    plan: Plan,
    *,
    ranks: int | None = None,
    steps: int = 4,
    overrides: Sequence[str] = (),
) -> Case:
    """What to run for a job and its plan, on the CPU.

    Args:
        ranks: At most so many; left out, four, or as many as `overrides` need.
        overrides: `field=value` of the small layout.

    Raises:
        JobError: An override is not one, or the layout has one rank.
    """
    small = small_layout(plan.layout, ranks)
    layout = with_overrides(small.layout, overrides)
    if ranks is not None and layout.num_ranks > ranks:
        raise _too_many(layout, ranks)
    if layout.num_ranks == 1 and not layout.keeps_shards:
        raise _one_rank(plan.layout)
    notes = list(small.notes if not overrides else ())
    if ranks is not None and layout.num_ranks < ranks:
        has = counted(layout.num_ranks, "rank")
        notes.append(f"on {has}, not {ranks}: the small layout is {layout.name}")
    seq_len = _seq_len(job.spec.data.seq_len, layout)
    decoder, config, dropout = plan.decoder, None, {}
    profile: ModelProfile | None = None
    vocab = _VOCAB
    if decoder is not None:
        decoder = small_decoder(decoder, layout)
        profile, vocab = profile_decoder(decoder, seq_len), decoder.vocab
        notes += _changes("the decoder", _sizes(plan.decoder), _sizes(decoder))
    elif (asked := resolve_config(job)) is not None:
        config = small_config(asked.config, layout)
        vocab = int(config["vocab_size"])
        dropout = {name: value for name, value in config.items() if _is_dropout(name, value)}
        config |= dict.fromkeys(dropout, 0.0)
        notes += _changes(asked.source, asked.config, config | dropout)
        profile = _profile_of(config, seq_len)
    else:
        vocab = 0
        notes.append("the model of your own is run as its factory builds it")
    if job.spec.train.adapter is not None:
        notes.append("without adapters: all of the model is trained")
    if (objective := objective_of(job.spec)) != "next_token":
        notes.append(f"with the loss of the next token, not {objective}")
    if seq_len != job.spec.data.seq_len:
        notes.append(f"samples of {seq_len} tokens, not {job.spec.data.seq_len}")
    return Case(
        job=dump_job(job.spec),
        folder=str(job.folder),
        source=job.source,
        decoder=decoder,
        config=config,
        dropout={name: float(value) for name, value in dropout.items()},
        layout=layout,
        precision=plan.precision,
        vocab=vocab,
        seq_len=seq_len,
        steps=steps,
        device="cpu",
        threads=1,
        # Not a multiple of the batch, so that one runs over an epoch's end.
        num_samples=layout.global_batch * steps + max(1, layout.global_batch // 2) + 1,
        runs=runs_of(layout, plan.precision, steps, job.spec.train.gradient_compression),
        predicted=None if profile is None else _predicted(profile, plan, layout),
        notes=tuple(notes),
    )


def small_layout(planned: Layout, ranks: int | None = None) -> _Small:
    """The planned layout with two ranks on every axis that has several, as far as they fit.

    Tensor comes first, then pipeline, context and data; experts are among the last two.

    >>> planned = Layout(data=8, sharding="full", micro_batch=1, accumulation=4, tensor=8)
    >>> small_layout(planned).layout.name
    'data 2 x tensor 2, FSDP2'
    """
    most = ranks or MOST_RANKS
    degrees = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1}
    left_out = []
    needs_dp_cp = planned.sharding != "none" or planned.expert > 1
    used = 1
    for axis in degrees:
        if getattr(planned, axis) == 1:
            continue
        # Sharding and experts need two of these ranks: one axis of two is kept for them.
        kept = 2 if needs_dp_cp and axis in ("tensor", "pipeline") else 1
        if used * 2 * kept <= most or (kept == 2 and used == 1 and used * 2 <= most):
            degrees[axis], used = 2, used * 2
        else:
            left_out.append(f"{axis} {getattr(planned, axis)}")
    hybrid = planned.sharding == "hybrid"
    while (hybrid or ranks) and used * 2 <= most and degrees["data"] * 2 <= planned.data:
        degrees["data"], used = degrees["data"] * 2, used * 2
    dp_cp = degrees["data"] * degrees["context"]
    sharding = planned.sharding
    if dp_cp == 1 and sharding != "none" and planned.offload != "cpu":
        sharding = "none"
        left_out.append(f"sharding {planned.sharding}")
    if sharding == "hybrid" and dp_cp < 4:
        sharding = "full"
        left_out.append("the copies of hybrid sharding")
    expert = 2 if planned.expert > 1 and dp_cp > 1 else 1
    if planned.expert > 1 and expert == 1:
        left_out.append(f"expert {planned.expert}")
    chunks = min(planned.chunks, 2) if degrees["pipeline"] > 1 else 1
    each_stage = 2 * max(1, SCHEDULE_FACTS[planned.schedule].least_rounds)
    offload = planned.offload if planned.offload == "cpu" and sharding != "none" else "none"
    if offload != planned.offload:
        left_out.append(f"offload {planned.offload}")
    layout = replace(
        planned,
        data=degrees["data"],
        tensor=degrees["tensor"],
        pipeline=degrees["pipeline"],
        context=degrees["context"],
        sharding=sharding,
        shard=2 if sharding == "hybrid" else None,
        expert=expert,
        chunks=chunks,
        micro_batch=min(planned.micro_batch, 2),
        accumulation=each_stage * degrees["pipeline"] if degrees["pipeline"] > 1 else 2,
        reduce_every_micro_batch=planned.reduce_every_micro_batch
        and sharding in ("full", "hybrid"),
        recompute_every=min(planned.recompute_every, 2),
        offload=offload,
    )
    notes = []
    if (layout.name, layout.num_ranks) != (planned.name, planned.num_ranks):
        notes.append(f"{layout.name}, standing for {planned.name}")
    if left_out:
        notes.append(
            f"not covered with {used} ranks: {', '.join(left_out)}; --ranks {used * 2} has room"
        )
    return _Small(layout, tuple(notes))


def with_overrides(layout: Layout, overrides: Sequence[str]) -> Layout:
    """The layout with `field=value` applied.

    Raises:
        JobError: V002, a field or a value that a layout does not have.
    """
    hints = get_type_hints(Layout)
    del hints["batch"]  # follows from the others, but after a loss
    for assignment in overrides:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or name not in hints:
            names = ", ".join(hints)
            raise _bad_override(assignment, f"write it like tensor=2; fields are {names}")
        try:
            layout = replace(layout, **{name: _read(text, hints[name])})
        except ValueError as error:
            raise _bad_override(assignment, str(error)) from None
    return layout


def _read(text: str, kind: Any) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("write true or false")
        return text == "true"
    options = get_args(kind)
    if options and all(isinstance(each, str) for each in options):
        if text not in options:
            raise ValueError(f"write one of {', '.join(options)}")
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("write a whole number above 0")
    return int(text)


def _bad_override(assignment: str, fix: str) -> JobError:
    what = f"{assignment!r} is not a field of a layout and its value"
    return JobError.of(code="V002", what=what, where="--layout", fix=fix)


def _one_rank(planned: Layout) -> JobError:
    return JobError.of(
        code="V001",
        what=f"{planned.name} is one rank: its run is the single device's, and there is "
        "nothing to compare",
        where="the plan's layout",
        fix="name a layout with several: --layout data=2, or cluster.per_node in the job",
    )


def _too_many(layout: Layout, ranks: int) -> JobError:
    fewer, rest = divmod(ranks, layout.num_ranks // layout.data)
    less = f"--layout data={fewer}, or " if fewer and not rest and fewer < layout.data else ""
    return JobError.of(
        code="V002",
        what=f"{layout.name} needs {counted(layout.num_ranks, 'rank')}, and --ranks is {ranks}",
        where="--layout",
        fix=f"{less}--ranks {layout.num_ranks}, or leave --ranks out",
    )


def small_decoder(shape: DecoderShape, layout: Layout) -> DecoderShape:
    """The built-in decoder with its sizes made small, where they are large.

    Heads keep their grouping, up to four to one, and are divisible by what splits them.
    """
    split = layout.tensor * (layout.context if layout.context_kind == "ulysses" else 1)
    group = min(shape.heads // shape.kv_heads, 4)
    kv_heads = min(shape.kv_heads, max(2, split)) if shape.kv_heads % split == 0 else shape.kv_heads
    layers = max(2, num_stages(layout))
    head_dim = min(shape.head_dim, _HEAD_DIM)
    heads = kv_heads * group
    square = shape.hidden == shape.heads * shape.head_dim
    hidden = heads * head_dim if square else min(shape.hidden, _MOST_HIDDEN)
    return replace(
        shape,
        layers=min(shape.layers, layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=min(shape.hidden, hidden),
        ffn=min(shape.ffn, 2 * hidden if shape.ffn % layout.tensor == 0 else 2 * hidden + 1),
        vocab=min(shape.vocab, _VOCAB if shape.vocab % layout.tensor == 0 else _VOCAB - 1),
    )


_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")
_RANKS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


def small_config(config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The fields of a config.json with its sizes made small, where they are large."""
    found = dict(config)
    split = layout.tensor * (layout.context if layout.context_kind == "ulysses" else 1)
    heads_name = _first(found, _HEADS)
    heads = int(found[heads_name]) if heads_name else 1
    kv_name = _first(found, _KV_HEADS)
    kv_heads = int(found[kv_name]) if kv_name else heads
    group = min(max(1, heads // kv_heads), 4)
    few = min(kv_heads, max(2, split)) if kv_heads % split == 0 else kv_heads
    _set(found, _HEADS, few * group if kv_name else min(heads, max(4, split)))
    _set(found, _KV_HEADS, few)
    heads = int(found[heads_name]) if heads_name else 1
    head_dim = _HEAD_DIM
    if isinstance(found.get("head_dim"), int):
        found["head_dim"] = min(found["head_dim"], head_dim)
    hidden_name = _first(found, _HIDDEN)
    hidden = min(int(found[hidden_name]), heads * head_dim) if hidden_name else heads * head_dim
    _set(found, _HIDDEN, hidden)
    _set(
        found,
        _LAYERS,
        min(int(found[_first(found, _LAYERS) or ""]), max(2, num_stages(layout)))
        if _first(found, _LAYERS)
        else 2,
    )
    for name in _WIDTHS:
        if isinstance(found.get(name), int):
            found[name] = min(found[name], 2 * hidden)
    experts = max(_MOST_EXPERTS, layout.expert)
    for name in _EXPERTS:
        if isinstance(found.get(name), int):
            found[name] = min(found[name], experts)
    for name in _PER_TOKEN:
        if isinstance(found.get(name), int):
            found[name] = min(found[name], 2)
    for name, most in _RANKS.items():
        if isinstance(found.get(name), int):
            found[name] = min(found[name], most)
    for name in ("n_group", "topk_group"):
        if isinstance(found.get(name), int):
            found[name] = 1
    layers = int(found[_first(found, _LAYERS) or ""]) if _first(found, _LAYERS) else 2
    if isinstance(found.get("layer_types"), list):
        found["layer_types"] = found["layer_types"][:layers]
    if isinstance(found.get("first_k_dense_replace"), int):
        found["first_k_dense_replace"] = min(found["first_k_dense_replace"], 1)
    for name in ("n_positions", "n_ctx"):
        if isinstance(found.get(name), int):
            found[name] = min(found[name], 2 * _SEQ_LEN)
    found["vocab_size"] = min(int(found.get("vocab_size", _VOCAB)), _VOCAB)
    return found


def _first(config: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(config.get(name), int)), None)


def _set(config: dict[str, Any], names: Sequence[str], value: int) -> None:
    for name in names:
        if isinstance(config.get(name), int):
            config[name] = value


def _is_dropout(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and ("drop" in name or name.endswith("_pdrop"))


def _seq_len(asked: int, layout: Layout) -> int:
    step = 2 * layout.context * layout.tensor
    return min(asked, -(-_SEQ_LEN // step) * step)


def _sizes(shape: DecoderShape | None) -> dict[str, Any]:
    if shape is None:
        return {}
    return {field.name: getattr(shape, field.name) for field in fields(shape)}


def _changes(source: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    changed = [
        f"{name} {after[name]} (of {value})"
        for name, value in before.items()
        if isinstance(value, int) and name in after and after[name] != value
    ]
    return [f"{source}, smaller: {', '.join(changed)}"] if changed else []


def _profile_of(config: Mapping[str, Any], seq_len: int) -> ModelProfile | None:
    try:
        return profile_config(config, seq_len)
    except JobError:
        return None


def _predicted(profile: ModelProfile, plan: Plan, layout: Layout) -> dict[str, int] | None:
    try:
        case = case_of(profile, plan.cluster, precision=plan.precision, optimizer=plan.optimizer)
        stages = stage_memory(layout, case)
    except (PacelineError, KeyError):
        return None
    parts = ("parameters", "gradients", "optimizer")
    found = {part: max(stage.parts[part] or 0 for stage in stages) for part in parts}
    return found
