"""The parallelize plan: module -> how its matrices are split over the tensor ranks.

Leaves out: engines without files, and a program's or a factory's own modules.
"""

from collections.abc import Iterator, Mapping

from paceline.job import Job
from paceline.parallel import Layout
from paceline.profile import ModelProfile, resolve_config, resolve_decoder
from paceline.profile.ways import HUGGING_FACE, OWN, UNSPLIT

_WORDS: Mapping[str, str] = {
    "column": "colwise",
    "row": "rowwise",
    "embedding": "rowwise, by rows of the vocabulary",
    "head": "colwise, by rows of the vocabulary; the logits stay split",
    "gathered head": "colwise, by rows of the vocabulary; the logits are gathered",
    "experts": "by expert",
    "wide norm": "colwise, with the heads it belongs to",
}
"""A way to split -> what it is called in `torch.distributed.tensor.parallel`. Containers have no
matrices of their own and are left out."""

_DENSE, _ROUTED, _GROUPED = "feed-forward", "experts of each tensor rank", "experts by rank"
"""Where a row holds: blocks without routed experts, with them, with expert ranks besides."""

_Row = tuple[str, str, str]
"""Module, way to split, and where it holds: empty is always."""

_TITAN_EXPERTS = "layers.*.moe.routed_experts.inner_experts"
_CORE_EXPERTS = "decoder.layers.*.mlp.experts"
_CORE: tuple[_Row, ...] = (
    ("embedding.word_embeddings", "embedding", ""),
    ("decoder.layers.*.self_attention.linear_qkv", "column", ""),
    ("decoder.layers.*.self_attention.linear_proj", "row", ""),
    ("decoder.layers.*.mlp.linear_fc1", "column", _DENSE),
    ("decoder.layers.*.mlp.linear_fc2", "row", _DENSE),
    (f"{_CORE_EXPERTS}.linear_fc1", "column", _ROUTED),
    (f"{_CORE_EXPERTS}.linear_fc2", "row", _ROUTED),
    (_CORE_EXPERTS, "experts", _GROUPED),
    ("output_layer", "head", ""),
)
_ENGINES: Mapping[str, tuple[_Row, ...]] = {
    # megatron-core 0.16.1: models/gpt/gpt_layer_specs.py and gpt_model.py; experts as
    # `expert_tensor_parallel_size` in the files has them.
    "megatron": _CORE,
    "megatron-bridge": _CORE,
    # torchtitan 0.3.0: models/common/decoder_sharding.py and moe_sharding.py.
    "torchtitan": (
        ("tok_embeddings", "embedding", ""),
        ("layers.*.attention.qkv_linear.wqkv", "column", ""),
        ("layers.*.attention.wo", "row", ""),
        ("layers.*.feed_forward.w1", "column", _DENSE),
        ("layers.*.feed_forward.w3", "column", _DENSE),
        ("layers.*.feed_forward.w2", "row", _DENSE),
        (f"{_TITAN_EXPERTS}.w1_EFD", "column", _ROUTED),
        (f"{_TITAN_EXPERTS}.w3_EFD", "column", _ROUTED),
        (f"{_TITAN_EXPERTS}.w2_EDF", "row", _ROUTED),
        (_TITAN_EXPERTS, "experts", _GROUPED),
        ("lm_head", "head", ""),
    ),
    # What Accelerate 1.15 has a program do: `tp_plan="auto"` of transformers 5.23,
    # models/llama/configuration_llama.py `base_model_tp_plan`, and its like in the other models.
    "accelerate": (
        ("model.layers.*.self_attn.q_proj", "column", ""),
        ("model.layers.*.self_attn.k_proj", "column", ""),
        ("model.layers.*.self_attn.v_proj", "column", ""),
        ("model.layers.*.self_attn.o_proj", "row", ""),
        ("model.layers.*.mlp.gate_proj", "column", _DENSE),
        ("model.layers.*.mlp.up_proj", "column", _DENSE),
        ("model.layers.*.mlp.down_proj", "row", _DENSE),
        ("model.layers.*.mlp.experts.gate_up_proj", "column", _ROUTED),
        ("model.layers.*.mlp.experts.down_proj", "row", _ROUTED),
        ("lm_head", "gathered head", ""),
    ),
}
"""Engine -> the rows of its files' models, cited from its source."""

_IN_TRANSFORMERS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s whose `base_model_tp_plan` was read."""


def parallelize_plan(job: Job, layout: Layout, profile: ModelProfile) -> dict[str, str]:
    """Module -> how its matrices are split over the tensor ranks, in PyTorch's words.

    As `paceline run` splits them, or the engine; `*` is each block. Empty without tensor ranks, of
    an engine without files, and for a module of the person's own, which says so itself
    (`paceline_ways`).
    """
    if layout.tensor == 1:
        return {}
    ours = job.spec.engine == "paceline"
    named = dict(_own(job) if ours else _of_engine(job, layout, profile))
    is_sequence = layout.sequence_parallel and job.spec.engine != "accelerate"
    rest = (
        "sequence: not split; each rank has its share of the tokens"
        if is_sequence
        else "replicated"
    )
    return named and named | {"all else": rest}


def _own(job: Job) -> Iterator[tuple[str, str]]:
    ways = OWN if resolve_decoder(job) is not None else None
    asked = resolve_config(job)
    if ways is None and asked is not None:
        kind = str(asked.config.get("model_type"))
        is_whole = any(asked.config.get(name) for name in UNSPLIT.get(kind, ()))
        ways = None if is_whole else HUGGING_FACE.get(kind)
    for name, way in () if ways is None else ways.tensor.items():
        if way in _WORDS:
            yield name, _WORDS[way]


def _of_engine(job: Job, layout: Layout, profile: ModelProfile) -> Iterator[tuple[str, str]]:
    asked = resolve_config(job)
    kind = "llama" if asked is None else str(asked.config.get("model_type"))
    engine = job.spec.engine
    if engine == "accelerate" and (job.spec.program is not None or kind not in _IN_TRANSFORMERS):
        return
    holds = _DENSE
    if any(block.experts for block in profile.blocks):
        holds = _GROUPED if layout.expert > 1 else _ROUTED
    for name, way, where in _ENGINES.get(engine, ()):
        if where in ("", holds):
            yield name, _WORDS[way]
