"""Model families of transformers, held to the real classes built on the meta device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from paceline.catalog.configs import load_published_configs
from paceline.errors import JobError, Problem
from paceline.profile import Block, block_flops, from_config, profile_config, saved_bytes
from paceline.profile.from_config import FAMILIES
from paceline.profile.model import as_classifier
from paceline.profile.saved import Kernels

PUBLISHED = {
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-j-6b": 6_050_882_784,
    "bloom-176b": 176_247_271_424,
    "opt-66b": 65_719_701_504,
    "mpt-7b": 6_649_286_656,
    "falcon-180b": 179_522_565_120,
    "phi-2": 2_779_683_840,
    "gpt-oss-20b": 20_914_757_184,
    "bert-large": 335_174_458,
    "t5-3b": 2_851_598_336,
    "vit-huge": 632_045_800,
}
"""Counts of the files on huggingface.co, as the model pages show them."""

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 389,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
GPT_LIKE: dict[str, Any] = {"vocab_size": 389, "n_embd": 48, "n_layer": 3, "n_head": 6}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    **LLAMA_LIKE,
    **EXPERTS,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}
BERT = {
    "vocab_size": 389,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 104,
    "max_position_embeddings": 70,
}
T5 = {"vocab_size": 389, "d_model": 48, "d_kv": 10, "d_ff": 104, "num_layers": 3, "num_heads": 6}
OPT = {**BERT, "ffn_dim": 104}
FALCON = {
    "vocab_size": 389,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}

ODD: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA_LIKE),
    ("llama", LLAMA_LIKE | {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("llama", LLAMA_LIKE | {"tie_word_embeddings": True}),
    ("mistral", LLAMA_LIKE | {"head_dim": 12}),
    ("mixtral", LLAMA_LIKE | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("qwen2", LLAMA_LIKE),
    ("qwen2", LLAMA_LIKE | {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen2_moe", LLAMA_LIKE | EXPERTS | {"num_experts": 7, "shared_expert_intermediate_size": 24}),
    (
        "qwen2_moe",
        LLAMA_LIKE
        | EXPERTS
        | {
            "num_experts": 7,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "qkv_bias": False,
        },
    ),
    ("qwen3", LLAMA_LIKE),
    ("qwen3", LLAMA_LIKE | {"attention_bias": True, "head_dim": 10}),
    ("qwen3_moe", LLAMA_LIKE | EXPERTS | {"num_experts": 7, "mlp_only_layers": [0, 3]}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "mlp_bias": True, "attention_bias": True}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"q_lora_rank": None, "attention_bias": True}),
    ("gemma", LLAMA_LIKE),
    ("gemma", LLAMA_LIKE | {"head_dim": 10, "tie_word_embeddings": False}),
    ("gemma2", LLAMA_LIKE | {"head_dim": 10}),
    ("gemma3_text", LLAMA_LIKE | {"head_dim": 10}),
    ("gpt2", GPT_LIKE | {"n_positions": 70}),
    ("gpt2", GPT_LIKE | {"n_inner": 100, "tie_word_embeddings": False}),
    (
        "gpt_neo",
        {
            "vocab_size": 389,
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": 6,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    ("gpt_neox", BERT),
    ("gpt_neox", BERT | {"attention_bias": False}),
    ("gptj", GPT_LIKE | {"rotary_dim": 4}),
    ("bloom", {"vocab_size": 389, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    ("opt", OPT),
    ("opt", OPT | {"word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    ("opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("mpt", {"vocab_size": 389, "d_model": 48, "n_layers": 3, "n_heads": 6}),
    ("falcon", FALCON),
    ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("phi", LLAMA_LIKE),
    ("phi", LLAMA_LIKE | {"qk_layernorm": True}),
    ("phi3", LLAMA_LIKE | {"pad_token_id": 0}),
    ("starcoder2", LLAMA_LIKE),
    ("starcoder2", LLAMA_LIKE | {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt_oss", LLAMA_LIKE | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    (
        "gpt_oss",
        LLAMA_LIKE
        | {"num_local_experts": 5, "num_experts_per_tok": 1, "attention_bias": False}
        | {"head_dim": 10},
    ),
    ("olmo2", LLAMA_LIKE),
    ("olmo2", LLAMA_LIKE | {"attention_bias": True}),
    ("bert", BERT),
    ("bert", BERT | {"tie_word_embeddings": False, "type_vocab_size": 3}),
    ("roberta", BERT),
    ("roberta", BERT | {"tie_word_embeddings": False}),
    ("distilbert", {"vocab_size": 389, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 104}),
    (
        "distilbert",
        {"vocab_size": 389, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 104}
        | {"tie_word_embeddings": False},
    ),
    ("t5", T5),
    ("t5", T5 | {"num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}),
    ("vit", BERT | {"image_size": 30, "patch_size": 7, "num_channels": 2, "qkv_bias": False}),
    ("vit", BERT | {"id2label": {"0": "a", "1": "b", "2": "c"}}),
]

HEADS = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(level)


def real_parameters(kind: str, config: Mapping[str, Any], head: str = "") -> int:
    """Parameters of the class in transformers, built without memory."""
    import torch

    with quiet_transformers() as transformers, torch.device("meta"):
        made = transformers.CONFIG_MAPPING[kind](**config)
        if head:
            model = getattr(transformers, head).from_config(made)
        elif kind in HEADS:
            model = getattr(transformers, HEADS[kind])(made)
        else:
            model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in model.parameters())


def profile_of(kind: str, config: Mapping[str, Any], seq_len: int = 64) -> Any:
    return profile_config({"model_type": kind, **config}, seq_len)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "config"), ODD, ids=[kind for kind, _ in ODD])
def test_parameters_equal_the_real_class_at_odd_sizes(kind: str, config: dict[str, Any]):
    pytest.importorskip("transformers")
    assert profile_of(kind, config).num_parameters == real_parameters(kind, config)


CLASSIFIED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neo", "gpt_neox")
CLASSIFIED += ("opt", "bloom", "phi", "gptj", "mixtral", "bert", "roberta", "distilbert")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CLASSIFIED)
def test_a_classifier_has_a_head_for_its_labels_and_not_for_the_vocabulary(kind: str):
    pytest.importorskip("transformers")
    config = dict(ODD)[kind] | {"num_labels": 7, "pad_token_id": 0}
    whole = profile_of(kind, dict(ODD)[kind])
    profile = as_classifier(whole, 7)
    assert profile.head_outputs == 7
    real = real_parameters(kind, config, "AutoModelForSequenceClassification")
    assert profile.num_parameters == real < whole.num_parameters + 7 * 49 + 48 * 49


def test_every_family_is_held_to_its_real_class():
    assert {kind for kind, _ in ODD} == set(FAMILIES)


def as_transformers_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: a latent query of width 0 is none."""
    values = {name: value for name, value in config.items() if name != "model_type"}
    return values | ({"q_lora_rank": None} if values.get("q_lora_rank") == 0 else {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", load_published_configs())
def test_a_published_model_has_the_parameters_of_its_real_class(name: str):
    pytest.importorskip("transformers")
    config = load_published_configs()[name].config
    real = real_parameters(config["model_type"], as_transformers_reads(config))
    assert profile_config(config, 2048).num_parameters == real


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_published_model_has_the_published_parameters(name: str, count: int):
    assert profile_config(load_published_configs()[name].config, 2048).num_parameters == count


def test_t5_of_version_1_1_has_an_output_matrix_of_its_own():
    base = T5 | {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12}
    base |= {"num_heads": 12, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    assert profile_of("t5", base).num_parameters == 247_577_856  # its file on huggingface.co


def test_every_published_model_names_its_source():
    assert all(each.source for each in load_published_configs().values())


def active_parameters(name: str) -> float:
    """Parameters that a token is multiplied with, from the FLOPs of one token."""
    profile = profile_config(load_published_configs()[name].config, 1)
    flops = profile.forward_flops_per_sample
    assert flops is not None
    return flops / 2


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.7), ("qwen3-30b-a3b", 3.0), ("deepseek-v3", 36.6), ("gpt-oss-120b", 5.1)],
)
def test_a_token_uses_only_its_experts(name: str, billions: float):
    """Active parameters as published, less the embedding, which is looked up."""
    assert active_parameters(name) == pytest.approx(billions * 1e9, rel=0.05)


def test_layers_with_a_window_are_a_kind_of_their_own():
    gemma = profile_config(load_published_configs()["gemma-3-1b"].config, 8192)
    assert [(each.window, each.count) for each in gemma.blocks] == [(512, 22), (0, 4)]
    flops = [block_flops(each, 8192) for each in gemma.blocks]
    assert flops[0] < flops[1]


def test_deepseek_starts_with_dense_layers():
    blocks = profile_config(load_published_configs()["deepseek-v3"].config, 4096).blocks
    assert [(each.name, each.count) for each in blocks] == [("dense", 3), ("moe", 58)]


def test_t5_has_an_encoder_and_a_decoder_that_attends_to_it():
    encoder, decoder = profile_config(load_published_configs()["t5-3b"].config, 512).blocks
    assert (encoder.causal, decoder.causal, decoder.cross_heads) == (False, True, 32)
    kernels = Kernels(compute_bytes=2, stream_bytes=2, norm_bytes=2)
    saved = [saved_bytes(each, kernels, 512) for each in (encoder, decoder)]
    assert saved[1].tensor > saved[0].tensor


def test_a_vision_transformer_has_its_own_tokens():
    vit = profile_config(load_published_configs()["vit-huge"].config, 4096)
    assert (vit.seq_len, vit.head_outputs, vit.head_tokens) == (257, 1000, 1)
    flops = vit.forward_flops_per_sample
    assert flops == pytest.approx(2 * 167e9, rel=0.02)  # 167.4 G multiply-adds, as timm counts


def test_samples_longer_than_the_learned_positions_are_said():
    gpt2 = load_published_configs()["gpt2"].config
    assert profile_config(gpt2, 1024).assumed == ()
    assert profile_config(gpt2, 2048).assumed == (
        "samples of 2048 tokens, though the model has 1024 learned positions",
    )


def problems(**config: Any) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        profile_config(config, 64)
    return list(caught.value.problems)


def test_an_unknown_family_names_the_nearest_and_which_fields_are_missing():
    (problem,) = problems(model_type="qwen3_next", vocab_size=10, hidden_size=16)
    assert problem.code == "M003"
    assert "model_type 'qwen3_next'; nearest are qwen3" in problem.what
    assert "num_hidden_layers, num_attention_heads, intermediate_size are missing" in problem.fix


@pytest.mark.parametrize("kind", [None, 7, ["llama"], {}, ""])
def test_a_model_type_that_is_no_name_is_unknown(kind: object):
    assert problems(model_type=kind)[0].code == "M003"


def test_a_language_model_inside_another_is_pointed_at():
    (problem,) = problems(model_type="gemma3", text_config={"hidden_size": 8})
    assert problem.fix.startswith("it holds a language model in text_config")


def test_every_missing_or_absurd_field_is_named_at_once():
    found = problems(
        model_type="mixtral",
        **LLAMA_LIKE | {"hidden_size": -4, "num_hidden_layers": 10**8, "vocab_size": "many"},
    )
    assert [problem.code for problem in found] == ["M004"] * len(found)
    said = " | ".join(problem.what for problem in found)
    for part in (
        "hidden_size is -4",
        "no num_experts_per_tok",
        "no num_local_experts or num_experts",
        "num_hidden_layers is 100000000",
        "vocab_size is 'many'",
    ):
        assert part in said


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("junk", [None, True, -1, 0, 1.5, "8", [1], {"a": 1}, 10**12])
def test_junk_in_every_field_never_ends_in_a_traceback(kind: str, junk: object):
    config = next(each for name, each in ODD if name == kind)
    for field in config:
        with suppress(JobError):
            profile_of(kind, {**config, field: junk})


def test_heads_that_do_not_divide_name_the_nearest_that_do():
    (problem,) = problems(model_type="llama", **LLAMA_LIKE | {"num_attention_heads": 9})
    assert (problem.code, problem.fix) == ("M005", "set num_attention_heads to 6 or 8")
    (problem,) = problems(model_type="llama", **LLAMA_LIKE | {"num_key_value_heads": 4})
    assert (problem.code, problem.fix) == ("M006", "set num_key_value_heads to 2 or 3")


def test_more_experts_a_token_than_there_are_is_refused():
    (problem,) = problems(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=6, **LLAMA_LIKE
    )
    assert problem.what.endswith("num_experts_per_tok is 6, above the number of experts 4")


def test_absent_parts_count_nothing():
    assert block_flops(Block(name="mlp", count=1, hidden=8, ffn=32), 10) == 2 * 10 * 2 * 8 * 32


@pytest.mark.parametrize("form", ["gated", "plain", "masked", "t5", "vit"])
def test_a_key_that_no_row_of_a_form_has_is_refused(form):
    with pytest.raises(ValueError, match=rf"families.toml: new: a row of form {form} has no biass"):
        from_config._family("new", {"form": form, "biass": True})
