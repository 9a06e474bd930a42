"""What blocks of real families leave for the backward pass, held to the classes of transformers.

Families whose code in transformers has no fused attention or keeps views of one wide tensor
(GPT-NeoX, BLOOM, MPT, Falcon, Phi, GPT-J, T5 and Gemma 2's soft caps) keep more there than counted
here; which kernels run is no property of the model.
"""

from typing import Any

import pytest

from paceline.profile import block_flops, profile_config, runtime_kernels, saved_bytes

SEQ_LEN = 96
DECODER = {
    "vocab_size": 389,
    "hidden_size": 192,
    "intermediate_size": 416,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "use_cache": False,
}
ENCODER = {
    "vocab_size": 389,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "gemma": DECODER,
    "gemma3_text": DECODER,
    "olmo2": DECODER,
    "starcoder2": DECODER | {"hidden_act": "gelu", "intermediate_size": 768},
    "gpt2": {
        "vocab_size": 389,
        "n_embd": 192,
        "n_layer": 3,
        "n_head": 6,
        "activation_function": "gelu",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    },
    "opt": {
        "vocab_size": 389,
        "hidden_size": 192,
        "ffn_dim": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "word_embed_proj_dim": 192,
        "dropout": 0.0,
        "use_cache": False,
    },
    "bert": ENCODER,
    "roberta": ENCODER,
    "vit": ENCODER | {"image_size": 70, "patch_size": 7},
}
EXPERTS = DECODER | {"moe_intermediate_size": 160, "num_experts_per_tok": 2}
ROUTED: dict[str, dict[str, Any]] = {
    "mixtral": DECODER | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"num_experts": 7, "shared_expert_intermediate_size": 96},
    "deepseek_v3": EXPERTS
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
    },
}
LAYER_NORM = {"starcoder2", "gpt2", "opt", "bert", "roberta", "vit"}
"""One kernel that keeps its input; RMSNorm is a chain of operations in transformers."""


def _block_costs(model) -> tuple[float, int]:
    """FLOPs and saved bytes of one sample in all blocks of a module on the meta device."""
    from paceline.runtime.measure_module import _sample_costs
    from paceline.runtime.strategy import repeated_blocks

    costs = _sample_costs(model, SEQ_LEN)
    each = [costs.of(index) for index in range(len(repeated_blocks(model)))]
    return sum(flops for flops, _ in each), sum(saved or 0 for _, saved in each)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CASES)
def test_a_family_keeps_what_its_real_class_keeps_within_5_percent(kind: str):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    heads = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}
    transformers.logging.set_verbosity_error()
    made = transformers.CONFIG_MAPPING[kind](**CASES[kind])
    with torch.device("meta"):
        if kind == "vit":
            model = transformers.ViTForImageClassification(made)
            model.example_inputs = lambda batch: torch.zeros(batch, 3, 70, 70)
        elif kind in heads:
            model = getattr(transformers, heads[kind])(made)
        else:
            model = transformers.AutoModelForCausalLM.from_config(made)
    real_flops, real_saved = _block_costs(model)

    profile = profile_config({"model_type": kind, **CASES[kind]}, SEQ_LEN)
    kernels = runtime_kernels("fp32", fused_norm=kind in LAYER_NORM)
    tokens = profile.seq_len or SEQ_LEN
    saved, flops = 0.0, 0.0
    for block in profile.blocks:
        each = saved_bytes(block, kernels, tokens)
        saved += block.count * tokens * (each.tensor + each.sequence)
        flops += block.count * block_flops(block, tokens)
    assert real_saved == pytest.approx(saved, rel=0.05)
    # With a mask transformers computes all scores, of which a causal kernel leaves out half.
    assert flops <= real_flops * 1.001
    assert flops >= real_flops * 0.9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ROUTED)
def test_experts_keep_what_the_real_class_keeps_within_5_percent(kind: str):
    """In bfloat16: the kernel that transformers runs experts with has no other type."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    transformers.logging.set_verbosity_error()
    made = transformers.CONFIG_MAPPING[kind](**ROUTED[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    real_flops, real_saved = _block_costs(model)
    profile = profile_config({"model_type": kind, **ROUTED[kind]}, SEQ_LEN)
    kernels = runtime_kernels("bf16-sharded", fused_norm=False)
    saved = 0.0
    for block in profile.blocks:
        each = saved_bytes(block, kernels, SEQ_LEN)
        routed = block.experts_per_token * (each.routed + each.routed_ends)
        saved += block.count * SEQ_LEN * (each.tensor + each.sequence + routed)
    assert real_saved == pytest.approx(saved, rel=0.05)
    flops = sum(block.count * block_flops(block, SEQ_LEN) for block in profile.blocks)
    assert flops == pytest.approx(real_flops, rel=0.06)  # it computes all scores
