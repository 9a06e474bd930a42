"""Tiny models of every kind that tensors are split in, and the float64 they are compared in."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.profile import DecoderShape
from paceline.profile.ways import HUGGING_FACE
from paceline.runtime.decoder import Decoder

SEQ_LEN = 16
VOCAB = 67
"""A prime: no degree divides it."""

OWN = ("own", "own-tied")

FAMILIES = tuple(sorted(HUGGING_FACE))

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 32,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FALCON = ("head_dim", "intermediate_size", "num_key_value_heads")

_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "falcon": {
        **{name: size for name, size in _SIZES.items() if name not in _FALCON},
        "new_decoder_architecture": True,
        "num_kv_heads": 4,
        "ffn_hidden_size": 64,
        "bias": True,
    },
    "gpt2": _GPT,
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 8,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "attention_dropout": 0.0,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neox": {**_SIZES, "hidden_dropout": 0.0},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_SIZES, **_EXPERTS},
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "qwen2_moe": {
        **_SIZES,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {**_SIZES, **_EXPERTS, "decoder_sparse_step": 2},
    "seed_oss": {**_SIZES, "residual_dropout": 0.0, "attention_dropout": 0.0},
}


def tiny(kind: str, **changes: Any) -> nn.Module:
    """A model of that kind, from torch's generator: two blocks, 8 heads, 4 key and value heads."""
    if kind in OWN:
        shape = DecoderShape(
            layers=2,
            hidden=32,
            heads=8,
            kv_heads=4,
            head_dim=4,
            ffn=64,
            vocab=VOCAB,
            tied_embeddings=kind == "own-tied",
            qkv_bias=True,
        )
        return Decoder(shape, SEQ_LEN)
    return _hugging_face(kind, changes)


def _hugging_face(kind: str, changes: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own making
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(kind, **{**_OTHER_SIZES.get(kind, _SIZES), **changes})
        config.use_cache = False
        config._experts_implementation = "eager"  # grouped_mm knows no float64
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that are not all ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits_of(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Logits of a model of either kind."""
    output = model(tokens_BS)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def compute_in_float64() -> None:
    """From here on, what a model's code makes float32 becomes float64: in norms, routers, softmax.

    So that two ways of summing can be told apart from two models: they differ by 1e-16, not 1e-7.
    """
    to, softmax, wide, narrow = Tensor.to, F.softmax, torch.float64, torch.float32

    def to_wide(self: Tensor, *args: Any, **options: Any) -> Tensor:
        args = tuple(wide if value is narrow else value for value in args)
        options = {name: wide if value is narrow else value for name, value in options.items()}
        result: Tensor = to(self, *args, **options)
        return result

    def softmax_wide(input: Tensor, dim: int, dtype: Any = None, **options: Any) -> Tensor:
        return softmax(input, dim=dim, dtype=wide if dtype is narrow else dtype, **options)

    Tensor.to = to_wide  # type: ignore[method-assign, assignment]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    F.softmax = softmax_wide  # type: ignore[assignment]
