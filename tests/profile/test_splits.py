"""Which models our own runtime can split how: a table without torch, held to the runtime's own."""

import inspect

import pytest

from paceline.profile import FAMILIES, splits_of
from paceline.profile.ways import HUGGING_FACE

strategy = pytest.importorskip("paceline.runtime.strategy", reason="needs torch")
from paceline.runtime.strategy.expert.split import PROVEN as EXPERT_CLASSES  # noqa: E402

LANGUAGE_MODELS = sorted(
    kind for kind, family in FAMILIES.items() if family.trains in ("CausalLM", "GPT2LMHeadModel")
)


def config(kind: str) -> dict[str, object]:
    """Enough of a config.json; a bias keeps llama from being the built-in decoder."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 512}
    return {"model_type": kind, "attention_bias": True} | sizes


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_matrices_and_stages_are_split_where_the_runtime_knows_how(kind: str):
    splits = splits_of(config(kind), 128)
    assert splits.tensor == (kind in HUGGING_FACE and bool(HUGGING_FACE[kind].tensor))
    assert not splits.pipeline or kind in HUGGING_FACE


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_experts_are_shared_where_their_class_was_compared_with_one_device(kind: str):
    names = {name.removesuffix("Experts").lower() for name in EXPERT_CLASSES}
    assert splits_of(config(kind), 128).expert == (kind.replace("_", "") in names)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_samples_are_split_only_where_attention_and_positions_can_be_given(kind: str):
    transformers = pytest.importorskip("transformers")
    auto = transformers.models.auto.modeling_auto
    with_head = getattr(transformers, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    name = auto.MODEL_MAPPING_NAMES[kind]
    base = getattr(transformers, name if isinstance(name, str) else name[0])
    can = with_head._can_set_attn_implementation()
    can = can and "position_ids" in inspect.signature(base.forward).parameters
    assert can or not splits_of(config(kind), 128).context_kinds


def test_a_ring_needs_attention_without_dropout_windows_and_caps():
    assert splits_of(config("phi"), 128).context_kinds == ("ring", "ulysses")
    assert splits_of(config("gpt2"), 128).context_kinds == ("ulysses",)
    assert splits_of(config("gemma2"), 128).context_kinds == ("ulysses",)
    windowed = config("mistral") | {"sliding_window": 64}
    assert splits_of(windowed, 128).context_kinds == ("ulysses",)
    assert "ring" in splits_of(windowed, 64).context_kinds


def test_the_built_in_decoder_is_split_every_way_but_by_experts():
    splits = splits_of(config("llama") | {"attention_bias": False}, 128)
    assert splits.tensor
    assert splits.pipeline
    assert not splits.expert
    assert splits.context_kinds == ("ring", "ulysses")
