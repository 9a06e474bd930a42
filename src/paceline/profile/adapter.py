"""LoRA, DoRA and QLoRA: which parameters are trained, and what the frozen ones take.

An adapter beside a linear of I inputs and O outputs has rank x (I + O) parameters, with DoRA O
more. Which linears there are depends on the code: GPT-2 has query, key and value in one linear,
Llama has three. Counts equal those of peft (tests/profile). Router and experts are taken as one
linear each, as transformers 4 has them; where transformers 5 fuses the experts' gate and up, peft
makes an adapter of twice the rank beside both, which is more.

QLoRA keeps the matrices of the blocks in NF4; embedding, norms and output matrix stay in 16 bits.

Source: Hu et al., arXiv:2106.09685, section 4.1; Dettmers et al., arXiv:2305.14314, section 3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, NamedTuple

from paceline.errors import JobError, Problem, did_you_mean
from paceline.job import AdapterSpec
from paceline.job.adapters import alpha_of
from paceline.profile.block import Block, matrices
from paceline.profile.model import Adapter, ModelProfile

NF4_BLOCK, NF4_BLOCK_BYTES = 64, 36
"""Values of a row with one scale, and their bytes in our own runtime: two codes a byte, and the
scale in float32. Source: arXiv:2305.14314, section 3, without double quantization."""

OWN_NF4_BYTES = NF4_BLOCK_BYTES / NF4_BLOCK
"""Bytes of a quantised parameter in our own runtime, which does not quantise the scales again."""

NF4_AT_ONCE = 1 << 22
"""Values that our own runtime restores at once: 16 MiB in float32, besides the result. A guess."""

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a parameter in other engines: four bits, an 8-bit scale for 64 of them, a float32 scale
for 256 scales. Source: arXiv:2305.14314, section 3, double quantization: 0.127 bits besides
the 4."""

TRANSPOSED = ("gpt2",)
"""`model_type`s whose linears have input x output features."""

FUSED = {
    "gpt2": "qkv",
    "gpt_neox": "qkv",
    "bloom": "qkv",
    "mpt": "qkv",
    "falcon": "qkv",
    "phi3": "qkv gate_up",
}
"""Families whose code has several of our linears in one."""

ATTENTION = ("query", "key", "value", "query_key_value", "attention_output")
_OTHER_NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "attention_output",
    "out_proj": "attention_output",
    "output": "attention_output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "dense": "attention_output",
    "dense_h_to_4h": "up",
    "dense_4h_to_h": "down",
    "c_fc": "up",
    "fc_in": "up",
    "fc_out": "down",
    "fc1": "up",
    "fc2": "down",
    "q_a_proj": "query_down",
    "q_b_proj": "query",
    "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value_up",
}
"""What Hugging Face calls our linears."""

_FUSED_NAMES = {
    "c_attn": "query_key_value",
    "Wqkv": "query_key_value",
    "qkv_proj": "query_key_value",
    "gate_up_proj": "gate_up",
}


class _Linear(NamedTuple):
    name: str
    inputs: int
    outputs: int
    matrices: tuple[str, ...]
    """Matrices of `profile.block` that it is, or is part of."""

    copies: int = 1


def with_adapter(
    profile: ModelProfile, spec: AdapterSpec | None, *, family: str | None, where: str
) -> ModelProfile:
    """The profile with only adapters trained; the profile itself when none are asked for.

    Args:
        family: `model_type` of its config.json; None for the built-in decoder.
        where: Place of `train.adapter` in the job.

    Raises:
        JobError: `M009`: the model's matrices are not known, or it has none of those names.
    """
    if spec is None:
        return profile
    if any(block.measured is not None for block in profile.blocks) or not profile.blocks:
        raise JobError.of(
            code="M009",
            what=f"the matrices inside {profile.name} are not known, so adapters beside them "
            "cannot be counted",
            where=where,
            fix="give the model by model.preset or model.hf_config, or leave train.adapter out",
        )
    fused = FUSED.get(family or "", "")
    linears = [_linears(block, fused) for block in profile.blocks]
    names = list(dict.fromkeys(linear.name for each in linears for linear in each))
    wanted = _wanted(spec, names, where)
    chosen = [[linear for linear in each if linear.name in wanted] for each in linears]
    widest = max((min(each.inputs, each.outputs) for some in chosen for each in some), default=0)
    if spec.rank > widest > 0:
        raise JobError.of(
            code="M009",
            what=f"train.adapter.rank is {spec.rank}, and the widest of the matrices beside "
            f"which adapters are is {widest} wide: they would not be of low rank",
            where=where,
            fix=f"set train.adapter.rank to {widest} or less; 8 to 64 are usual",
        )
    in_block = tuple(_adapters(spec, each) for each in chosen)
    quantised = sum(block.count * _quantised(block) for block in profile.blocks)
    columns, rows = _scaled(profile, spec, chosen)
    adapter = Adapter(
        rank=spec.rank,
        scaled_columns=columns,
        scaled_rows=rows,
        matrices=tuple(
            dict.fromkeys(name for each in chosen for linear in each for name in linear.matrices)
        ),
        num_parameters=sum(
            block.count * num for block, num in zip(profile.blocks, in_block, strict=True)
        ),
        num_block_parameters=in_block,
        num_quantised_parameters=quantised if spec.kind == "qlora" else 0,
        targets=tuple(name for name in names if name in wanted),
    )
    return replace(profile, adapter=adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """The adapters that the runtime puts beside a model's linears."""

    targets: tuple[str, ...]
    """Our names of the linears, as `linear_name` gives them."""

    rank: int
    scale: float
    """What an adapter adds is multiplied by it."""

    dropout: float
    frozen_type: Literal["float32", "bfloat16", "float16"]
    """Type of the frozen parameters."""

    num_parameters: int
    """Parameters of all adapters together, as planned."""

    has_magnitudes: bool = False
    """DoRA: whether the length of each output's row is trained as well."""

    num_quantised: int = 0
    """Frozen parameters in NF4, as planned: all matrices of the blocks, or none."""

    seed: int


def adaptation_of(adapter: Adapter, spec: AdapterSpec, *, precision: str, seed: int) -> Adaptation:
    """What the runtime does for `train.adapter`."""
    alpha = alpha_of(spec)
    frozen: Mapping[str, Literal["float32", "bfloat16", "float16"]]
    frozen = {"fp32": "float32", "tf32": "float32", "fp16": "float16"}
    return Adaptation(
        targets=adapter.targets,
        rank=spec.rank,
        scale=alpha / (sqrt(spec.rank) if spec.scaling == "rslora" else spec.rank),
        dropout=spec.dropout,
        frozen_type=frozen.get(precision, "bfloat16"),
        num_parameters=adapter.num_parameters,
        has_magnitudes=spec.kind == "dora",
        num_quantised=adapter.num_quantised_parameters,
        seed=seed,
    )


def linear_name(path: str) -> str:
    """Our name of a linear, from its place in a block; its last part where we have none.

    >>> linear_name("self_attn.q_proj"), linear_name("mlp.c_proj"), linear_name("attn.c_proj")
    ('query', 'down', 'attention_output')
    """
    parent, _, last = path.rpartition(".")
    if last == "c_proj":
        return "attention_output" if "attn" in parent else "down"
    name = _FUSED_NAMES.get(last) or _OTHER_NAMES.get(last, last)
    return f"shared_{name}" if "shared_expert" in parent else name


def beside_experts(adapter: Adapter) -> list[str]:
    """Targets that the runtime puts no adapters beside: experts are no linears of their own, but
    tensors of all experts."""
    return [name for name in adapter.targets if name == "router" or name.startswith("expert_")]


def unquantisable(profile: ModelProfile, tensor: int = 1) -> list[str]:
    """Matrices that cannot be in NF4 on so many tensor ranks, each with its numbers: a row of a
    rank's part must be whole blocks. Empty without QLoRA.

    >>> from paceline.profile import DecoderShape, profile_decoder
    >>> shape = DecoderShape(layers=2, hidden=128, heads=2, kv_heads=2, head_dim=64, ffn=192,
    ...     vocab=256, tied_embeddings=False)
    >>> asked = AdapterSpec(kind="qlora")
    >>> profile = with_adapter(profile_decoder(shape, 64), asked, family=None, where="")
    >>> unquantisable(profile), unquantisable(profile, tensor=2)
    ([], ['down has 192 inputs, 96 a rank'])
    """
    if profile.adapter is None or not profile.adapter.num_quantised_parameters:
        return []
    found: dict[str, None] = {}
    for matrix in (each for block in profile.blocks for each in matrices(block) if each.outputs):
        ranks = tensor if matrix.split == "row" else 1
        if matrix.inputs % (NF4_BLOCK * ranks):
            share = f", {matrix.inputs // ranks} a rank" if ranks > 1 else ""
            found[f"{matrix.name} has {matrix.inputs} inputs{share}"] = None
    return list(found)


def cannot_adapt(profile: ModelProfile, spec: AdapterSpec, *, family: str | None) -> Iterator[str]:
    """Why our own runtime cannot train adapters of the kind that is asked for, in any layout."""
    if spec.kind == "dora" and spec.dropout:
        yield f"dropout {spec.dropout:g} needs a second product with the frozen matrix"
    if spec.kind != "qlora":
        return
    if any(block.experts for block in profile.blocks):
        yield "its routed experts are no linears, and only those are kept in NF4"
    elif family in TRANSPOSED:
        yield f"{family} keeps its matrices as inputs x outputs, which are not quantised"
    elif names := unquantisable(profile):
        yield f"{', '.join(names)}, which is no multiple of NF4's blocks of {NF4_BLOCK} values"


def _adapters(spec: AdapterSpec, linears: list[_Linear]) -> int:
    has_magnitudes = spec.kind == "dora"
    return sum(
        each.copies * (spec.rank * (each.inputs + each.outputs) + has_magnitudes * each.outputs)
        for each in linears
    )


def _scaled(
    profile: ModelProfile, spec: AdapterSpec, chosen: list[list[_Linear]]
) -> tuple[float, float]:
    """Outputs of a block's linears that DoRA scales: of columns, and of all others."""
    if spec.kind != "dora":
        return 0.0, 0.0
    sums = {True: 0, False: 0}
    for block, linears in zip(profile.blocks, chosen, strict=True):
        splits = {matrix.name: matrix.split for matrix in matrices(block)}
        for linear in linears:
            is_column = splits[linear.matrices[0]] == "column"
            sums[is_column] += block.count * linear.outputs * linear.copies
    return sums[True] / profile.num_blocks, sums[False] / profile.num_blocks


def _wanted(spec: AdapterSpec, names: list[str], where: str) -> set[str]:
    if not spec.targets:
        raise JobError.of(
            code="M009",
            what="train.adapter.targets is an empty list, so nothing would be trained",
            where=where,
            fix=f"choose from {', '.join(names)}, or write attention or all",
        )
    if spec.targets == "all":
        return set(names)
    if spec.targets == "attention":
        latent = ("query_down", "key_value_down", "key_value_up")
        return {name for name in names if name in (*ATTENTION, *latent)}
    asked = [_OTHER_NAMES.get(name, name) for name in spec.targets]
    asked = [_fused_name(name, names) for name in asked]
    JobError.raise_for(
        [
            Problem(
                code="M009",
                what=f"train.adapter.targets names {target!r}, and the model has no such linear",
                where=where,
                fix=f"{did_you_mean(target, names, cutoff=0.5)} Choose from {', '.join(names)}, or "
                "write attention or all".lstrip(),
            )
            for target, name in zip(spec.targets, asked, strict=True)
            if name not in names
        ]
    )
    return set(asked)


def _fused_name(name: str, names: list[str]) -> str:
    """Where several are one linear, an adapter of one of them is beside all."""
    name = _FUSED_NAMES.get(name, name)
    if name in ("gate", "up") and "gate_up" in names:
        return "gate_up"
    return name


def _linears(block: Block, fused: str) -> list[_Linear]:
    """The linears of one block as the code has them."""
    found: list[_Linear] = []
    for matrix in matrices(block):
        name, inputs, outputs, copies = matrix.name, matrix.inputs, matrix.outputs, matrix.copies
        if not (inputs and outputs and copies):
            continue
        if name == "key_value":
            key = block.kv_heads * block.head_dim
            found.append(_Linear("key", inputs, key, ("key_value",)))
            found.append(_Linear("value", inputs, outputs - key, ("key_value",)))
        elif name.endswith("up") and block.gated and name != "key_value_up":
            gate = name.replace("up", "gate")
            found.append(_Linear(gate, inputs, outputs // 2, (name,), copies))
            found.append(_Linear(name, inputs, outputs // 2, (name,), copies))
        elif name == "cross_key_value":
            found.append(_Linear("cross_key", inputs, outputs // 2, (name,)))
            found.append(_Linear("cross_value", inputs, outputs // 2, (name,)))
        else:
            found.append(_Linear(name, inputs, outputs, (name,), copies))
    if "qkv" in fused:
        found = _join(found, ("query", "key", "value"), "query_key_value")
    if "gate_up" in fused:
        found = _join(found, ("gate", "up"), "gate_up")
    return found


def _join(linears: list[_Linear], parts: tuple[str, ...], name: str) -> list[_Linear]:
    ours = [linear for linear in linears if linear.name in parts]
    rest = [linear for linear in linears if linear.name not in parts]
    if not ours:
        return rest
    joined = tuple(dict.fromkeys(each for linear in ours for each in linear.matrices))
    outputs = sum(linear.outputs for linear in ours)
    return [_Linear(name, ours[0].inputs, outputs, joined), *rest]


def _quantised(block: Block) -> int:
    """Parameters of one block that QLoRA keeps in NF4."""
    return sum(each.copies * each.inputs * each.outputs for each in _linears(block, ""))
