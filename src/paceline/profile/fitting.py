"""Whether the tensors of weight files are those of a model: by names, shapes and types, no values
read.

For the built-in decoder its sizes say what it has, so that a run is refused before it starts. A
model of transformers is compared where it is built, on the ranks (`runtime/pretrained_names.py`):
before the start only the types of its weights are looked at.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from paceline.errors import Problem
from paceline.job.safetensors import StoredTensor
from paceline.profile.hf_names import from_hf_name, to_hf_name
from paceline.profile.shape import DecoderShape

_SHOWN = 20
"""Names in one message. A guess at what still helps."""

_READ = ("F64", "F32", "F16", "BF16")
"""Types that are read; others are of quantised models, whose numbers need their scales."""

COMPUTED = r"rotary_emb\.inv_freq$"
"""Tables that older files have and models compute. Source: transformers, `modeling_utils.py`."""


def decoder_tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Name of each parameter of the built-in decoder -> its shape, a tied output included."""
    hidden, query = (shape.hidden,), (shape.heads * shape.head_dim, shape.hidden)
    key = (shape.kv_heads * shape.head_dim, shape.hidden)
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": hidden,
        "attention.query.weight": query,
        "attention.key.weight": key,
        "attention.value.weight": key,
        "attention.output.weight": query[::-1],
        "ffn_norm.weight": hidden,
        "ffn.gate.weight": (shape.ffn, shape.hidden),
        "ffn.up.weight": (shape.ffn, shape.hidden),
        "ffn.down.weight": (shape.hidden, shape.ffn),
    }
    if shape.qkv_bias:
        for part in ("attention.query", "attention.key", "attention.value"):
            block[f"{part}.bias"] = block[f"{part}.weight"][:1]
    ends = (shape.vocab, shape.hidden)
    tensors = {"embedding.weight": ends, "norm.weight": hidden, "output.weight": ends}
    for number in range(shape.layers):
        tensors |= {f"blocks.{number}.{name}": size for name, size in block.items()}
    return tensors


def decoder_name(name: str) -> str | None:
    """The built-in decoder's name of a stored tensor; None for none. A file of the model without
    its head has no `model.` before the names."""
    return from_hf_name(name) or from_hf_name(f"model.{name}")


def check_decoder_tensors(
    shape: DecoderShape, stored: Mapping[str, StoredTensor], *, where: str
) -> Iterator[Problem]:
    """`M013`: every tensor of the files that the built-in decoder lacks, that it has and the files
    lack, and of another shape than its own; `M014`: of a type that is not read."""
    yield from check_decoder_sizes(shape, {n: t.shape for n, t in stored.items()}, where=where)
    wanted = decoder_tensors(shape)
    yield from check_types((t for name, t in stored.items() if decoder_name(name) in wanted), where)


def check_decoder_sizes(
    shape: DecoderShape, sizes: Mapping[str, tuple[int, ...]], *, where: str
) -> Iterator[Problem]:
    """The `M013` of `check_decoder_tensors`, for tensors of which only the sizes are known."""
    wanted = decoder_tensors(shape)
    targets = {name: decoder_name(name) for name in sizes}
    found = {target: sizes[name] for name, target in targets.items() if target in wanted}
    lacking = [name for name in wanted if name not in found]
    tied: set[str] = {"embedding.weight", "output.weight"} if shape.tied_embeddings else set()
    missing = [name for name in lacking if name not in tied or tied <= set(lacking)]
    if tied and tied <= set(missing):
        missing.remove("output.weight")
    left_over = [
        name
        for name, target in targets.items()
        if target not in wanted and not re.search(COMPUTED, name)
    ]
    wrong = {name: size for name, size in found.items() if name and size != wanted[name]}
    yield from mismatches(missing, left_over, wrong, wanted, where)


def check_types(used: Iterable[StoredTensor], where: str) -> Iterator[Problem]:
    """`M014`, one problem for each type that is not read."""
    other: dict[str, list[str]] = {}
    for stored in used:
        if stored.dtype not in _READ:
            other.setdefault(stored.dtype, []).append(stored.name)
    for dtype, names in other.items():
        yield Problem(
            code="M014",
            what=f"{len(names)} tensors are stored as {dtype}: {listed(names)}",
            where=where,
            fix="these are quantised weights; give the folder of the model in bf16, fp16 or fp32",
        )


def mismatches(
    missing: Sequence[str],
    left_over: Sequence[str],
    wrong: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    where: str,
) -> Iterator[Problem]:
    """`M013`, one problem for each kind of mismatch, with every name.

    Args:
        missing: Parameters that no file has.
        left_over: Stored tensors that the model has not.
        wrong: Parameters whose stored shape is another -> that shape.
        wanted: Every parameter -> its shape.
        where: Place of the files in the job.
    """
    fix = "give the config.json and the weights of the same model, whole"
    if missing:
        names = [to_hf_name(name) or name for name in missing]
        what = f"{len(missing)} tensors that the model has are not in the files: {listed(names)}"
        yield Problem(code="M013", what=what, where=where, fix=fix)
    if left_over:
        what = f"{len(left_over)} tensors of the files are not in the model: {listed(left_over)}"
        yield Problem(code="M013", what=what, where=where, fix=fix)
    if wrong:
        shown = [
            f"{to_hf_name(name) or name} ({_sizes(shape)}, not {_sizes(wanted[name])})"
            for name, shape in wrong.items()
        ]
        what = f"{len(wrong)} tensors of the files have another shape: {listed(shown)}"
        yield Problem(code="M013", what=what, where=where, fix=fix)


def listed(names: Sequence[str]) -> str:
    """Names in a message, the first of many."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "parts of different shapes"
