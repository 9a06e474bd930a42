"""The job's model as a `DecoderShape`: by its sizes, by preset, or from a config.json."""

from collections.abc import Iterator

from paceline.catalog import find_model_preset
from paceline.errors import JobError, Problem
from paceline.profile.shape import DecoderShape
from paceline.spec import DecoderSpec, Job
from paceline.spec.hf_config import HfConfig, load_hf_config


def resolve_decoder(job: Job) -> DecoderShape | None:
    """The built-in decoder's sizes, all resolved; None for a `model.factory`.

    Raises:
        JobError: The preset is unknown, the config.json unusable, or sizes do not go together.
    """
    model = job.spec.model
    if model.decoder is not None:
        shape, names = _shape_of_spec(model.decoder), _SPEC_NAMES
        places = {field: job.where(f"model.decoder.{name}") for field, name in names.items()}
        given_head_dim = False
    elif model.hf_config is not None:
        config = load_hf_config(job)
        shape, names = _shape_of_config(config), _HF_NAMES
        places = dict.fromkeys(names, job.where("model.hf_config"))
        given_head_dim = config.head_dim is not None
    else:
        return None if model.preset is None else _shape_of_preset(job, model.preset)
    problems = list(_check_sizes(shape, names, places, given_head_dim=given_head_dim))
    if problems:
        raise JobError(*problems)
    return shape


def ffn_width(hidden: int) -> int:
    """Width of the feed-forward layer when none is given: 8/3 of hidden, up to a multiple of 32.

    Two thirds of the usual 4 x hidden, since SwiGLU has three matrices instead of two.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, section 3.

    >>> ffn_width(128)
    352
    """
    return -(-8 * hidden // (3 * 32)) * 32


_SPEC_NAMES = {"hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "heads"}
_HF_NAMES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def _shape_of_spec(spec: DecoderSpec) -> DecoderShape:
    return DecoderShape(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.heads if spec.kv_heads == "auto" else spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        ffn=ffn_width(spec.hidden) if spec.ffn == "auto" else spec.ffn,
        vocab=spec.vocab,
        tied_embeddings=spec.tied_embeddings,
    )


def _shape_of_config(config: HfConfig) -> DecoderShape:
    return DecoderShape(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim or config.hidden // config.heads,
        ffn=config.ffn,
        vocab=config.vocab,
        tied_embeddings=config.tied_embeddings,
        qkv_bias=config.qkv_bias,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
    )


def _shape_of_preset(job: Job, name: str) -> DecoderShape:
    preset = find_model_preset(name, where=job.where("model.preset"))
    return DecoderShape(
        layers=preset.layers,
        hidden=preset.hidden,
        heads=preset.heads,
        kv_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        ffn=preset.ffn,
        vocab=preset.vocab,
        tied_embeddings=preset.tied_embeddings,
        qkv_bias=preset.qkv_bias,
        rope_theta=preset.rope_theta,
        norm_eps=preset.norm_eps,
    )


def _check_sizes(
    shape: DecoderShape, names: dict[str, str], places: dict[str, str], *, given_head_dim: bool
) -> Iterator[Problem]:
    """Sizes that cannot be built; `names` are what the reader calls the fields."""
    hidden, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
    if not given_head_dim and hidden % heads:
        yield Problem(
            code="M005",
            what=f"{names['heads']} {heads} does not divide {names['hidden']} {hidden}: "
            f"a head would be {hidden / heads:.2f} wide",
            where=places["heads"],
            fix=_nearest_fix(names["heads"], heads, _divisors(hidden)),
        )
    elif shape.head_dim % 2:
        yield Problem(
            code="M007",
            what=f"a head is {shape.head_dim} wide ({names['hidden']} {hidden}, {names['heads']} "
            f"{heads}); rotary positions turn pairs, so it must be even",
            where=places["head_dim"],
            fix=f"write an even {names['head_dim']}"
            if given_head_dim
            else _nearest_fix(
                names["heads"], heads, [n for n in _divisors(hidden) if hidden // n % 2 == 0]
            ),
        )
    if heads % kv_heads:
        yield Problem(
            code="M006",
            what=f"{names['kv_heads']} {kv_heads} does not divide {names['heads']} {heads}: every "
            "key and value head serves the same number of heads",
            where=places["kv_heads"],
            fix=_nearest_fix(names["kv_heads"], kv_heads, _divisors(heads)),
        )


def _nearest_fix(name: str, value: int, allowed: list[int]) -> str:
    near = sorted(sorted(allowed, key=lambda each: abs(each - value))[:2])
    if not near:
        return "make hidden an even number"
    return f"set {name} to {' or '.join(str(each) for each in near)}"


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
