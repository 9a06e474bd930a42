"""Megatron-LM's weights by the names of Hugging Face: Llama, Mistral and Qwen2, and GPT-2.

    torch_dist  iter_*/ as torch.distributed.checkpoint has it, the layers of one kind stacked
    legacy      iter_*/mp_rank_TT[_PPP]/model_optim_rng.pt, one for each tensor and pipeline rank

Query, key and value of a Megatron model are one matrix, group by group of key heads; gate and up
are one as well. Any setting or tensor beyond these families is refused by name.

Source: Megatron-LM, core/transformer/attention.py (`SelfAttention.get_query_key_value_tensors`),
core/transformer/mlp.py (`apply_swiglu_sharded_factory`), tools/checkpoint/schema_core.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.external import (
    Entry,
    Weights,
    entry,
    not_whole,
    tensors_in,
    tensors_of,
)
from paceline.runtime.checkpoint.pickles import read_pickle
from paceline.runtime.checkpoint.state_files import StateFiles

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_NO_WEIGHTS = re.compile(
    r"(^|\.)(optimizer|rng_state|rerun_state\w*|opt_param_scheduler)|_extra_state"
)

_SAME = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Transformer Engine's names of the norms that it fuses -> those without it."""

_ROWS = ("linear_proj.weight", "linear_fc2.weight")
_COLUMNS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.", "linear_fc1.")
"""Which of its dimensions tensor ranks share: 1, and 0."""

_LLAMA = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_GPT2 = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.": "transformer.ln_f.",
    "input_layernorm.": "ln_1.",
    "pre_mlp_layernorm.": "ln_2.",
    "self_attention.linear_proj.": "attn.c_proj.",
    "mlp.linear_fc1.": "mlp.c_fc.",
    "mlp.linear_fc2.": "mlp.c_proj.",
}
"""GPT-2's matrices have input x output features, so they are turned."""

_LLAMA_LIKE = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
}
_GPT2_LIKE = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
_PLAIN = {
    "num_experts": None,
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_layernorm_1p": False,
    "squared_relu": False,
    "is_hybrid_model": False,
    "hybrid_layer_pattern": None,
    "mtp_num_layers": None,
    "window_size": None,
}
"""Megatron's arguments and the values with which a model is of a family here; absent ones are
off."""

_NEEDED = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"),
    "max_position_embeddings",
)
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def read_megatron(path: Path) -> Weights:
    """The weights of an `iter_*` folder and the config.json of the model that they are.

    Raises:
        CheckpointError: `C015`, `M012`: a file cannot be read, or is missing; `C012`, the model
            is of another family or layout.
    """
    about = partial(CheckpointError.of, code="C012", where=str(path))
    fix = "export it with Megatron-Bridge: examples/conversion/convert_checkpoints.py export"
    is_dcp = (path / ".metadata").is_file()
    args, tensors, others, holds_optimizer = _stacked(path) if is_dcp else _of_ranks(path)
    get = vars(args).get
    has_bias = bool(get("add_qkv_bias"))
    likes = {"llama": _LLAMA_LIKE, "gpt2": _GPT2_LIKE}
    wrong = {name: _differing(get, {**_PLAIN, **like}) for name, like in likes.items()}
    family = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[family]:
        what = f"{path.name} is no Llama, Mistral, Qwen2 or GPT-2: {', '.join(wrong[family])}"
        raise about(what=what, fix=fix)
    tensors = {_common(name): each for name, each in tensors.items()}
    heads, hidden = int(args.num_attention_heads), int(args.hidden_size)
    groups = int(get("num_query_groups") or heads) if get("group_query_attention") else heads
    width = int(get("kv_channels") or hidden // heads)
    entries: dict[str, Entry] = {}
    for name, each in tensors.items():
        found = _LAYER.fullmatch(name)
        inner = found[2] if found else name
        if family == "llama":
            parts = _llama(inner, each, groups, heads // groups, width)
            prefix = f"model.layers.{found[1]}." if found else ""
        else:
            parts = _gpt2(inner, each, groups, width)
            prefix = f"transformer.h.{found[1]}." if found else ""
        if parts is None:
            raise about(what=f"{name} has no place in a {family} of Hugging Face", fix=fix)
        entries |= {prefix + part: value for part, value in parts.items()}
    layers = int(args.num_layers)
    lost = [str(n) for n in range(layers) if not any(f".{n}." in name for name in entries)]
    if lost:
        raise not_whole(path, f"layers {', '.join(lost[:8])} of {layers} are not there")
    config = (_llama_config if family == "llama" else _gpt2_config)(args, entries, has_bias)
    notes = (f"names are those of {config['architectures'][0]}; config.json is from its arguments",)
    unread = "Megatron's optimizer is laid out by its ranks" if holds_optimizer else ""
    return Weights(entries=entries, notes=notes, config=config, unread=unread, others=others)


def _differing(get: Callable[..., Any], like: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {value}"
        for name, wanted in like.items()
        if (value := get(name, wanted)) != wanted and (value or wanted)
    ]


def _common(name: str) -> str:
    for fused, plain in _SAME.items():
        name = name.replace(fused, plain)
    return name


_Read = tuple[Any, dict[str, Entry], dict[str, Entry], bool]
"""Arguments, the model's tensors, the optimizer's, and whether there is an optimizer."""


def _stacked(path: Path) -> _Read:
    args, files = read_pickle(path / "common.pt").get("args"), StateFiles(path)
    whole = lru_cache(maxsize=2)(files.value)  # one tensor has a part of every layer
    entries, others, holds_optimizer = dict[str, Entry](), dict[str, Entry](), False
    for name, each in tensors_of(files).items():
        if name.startswith(("optimizer.", "chained_")):
            holds_optimizer, others[name] = True, each
        if _NO_WEIGHTS.search(name):
            continue
        found = _STACKED.fullmatch(name)
        if found is None:
            entries[name] = each
            continue
        for layer in range(each.shape[0]):
            load = partial(_layer_of, whole, name, layer)
            inner = f"decoder.layers.{layer}.{found[1]}"
            entries[inner] = Entry(each.dtype, each.shape[1:], load)
    return _known(args, path), entries, others, holds_optimizer


def _layer_of(whole: Callable[[str], Tensor], name: str, layer: int) -> Tensor:
    return whole(name)[layer].clone()


def _of_ranks(path: Path) -> _Read:
    """Those of the folders of ranks, the model's tensors joined over tensor ranks."""
    stages: dict[int, dict[str, Any]] = {}
    for folder in sorted(path.glob("mp_rank_*")):
        stage = (*map(int, folder.name.split("_")[3:4]), 0)[0]
        stages.setdefault(stage, {})[folder.name] = read_pickle(folder / "model_optim_rng.pt")
    ranks = {name: state for held in stages.values() for name, state in held.items()}
    for name, state in ranks.items():
        args = _known(state.get("args"), path / name)
        experts = vars(args).get("num_experts")
        if why := f"num_experts {experts}" if experts else _unread(state.get("model")):
            raise CheckpointError.of(
                code="C012",
                what=f"layout not read: {name} of {path.name} has {why}",
                where=str(path / name),
                fix="save it as torch_dist from a dense model of Megatron Core; Megatron-LM's "
                "tools/checkpoint/convert.py turns a legacy model into one",
            )
    _alike(path, "iteration", {name: state.get("iteration") for name, state in ranks.items()})
    for key in dict.fromkeys((*_NEEDED, *_DEGREES, *_LLAMA_LIKE, *_GPT2_LIKE, *_PLAIN)):
        _alike(path, key, {name: vars(state["args"]).get(key) for name, state in ranks.items()})
    args = next(iter(ranks.values()))["args"]
    there = (max(map(len, stages.values())), len(stages))
    for key, size in zip(_DEGREES, there, strict=True):
        if (wrote := vars(args).get(key, size)) != size:
            raise not_whole(path, f"{key} is {wrote}, and files of {size} are there")
    entries: dict[str, Entry] = {}
    layers = 0
    holds_optimizer = any(path.glob("mp_rank_*/distrib_optim.pt"))
    is_untied = vars(args).get("untie_embeddings_and_output_weights")
    for _, held in sorted(stages.items()):
        models = {name: state["model"] for name, state in sorted(held.items())}
        holds_optimizer |= any(state.get("optimizer") for state in held.values())
        mine = 0
        for name in dict.fromkeys(name for model in models.values() for name in model):
            if _NO_WEIGHTS.search(name):
                continue
            lost = [rank for rank, model in models.items() if name not in model]
            if lost:
                raise not_whole(path, f"{lost[0]}/model_optim_rng.pt has no {name}")
            found = _LAYER.fullmatch(name)
            mine = max(mine, int(found[1]) + 1 if found else 0)
            outer = f"decoder.layers.{layers + int(found[1])}.{found[2]}" if found else name
            if outer == "output_layer.weight" and not is_untied:
                continue  # the last stage's copy of the embedding
            parts = [model[name] for model in models.values()]
            if (dim := _dim_shared(name)) is None:
                _check_copies(path, name, {rank: model[name] for rank, model in models.items()})
            entries[outer] = _joined(name, parts, dim, halves=bool(vars(args).get("swiglu")))
        layers += mine
    others = {
        f"optimizer.{rank}.{name}": each
        for rank, state in ranks.items()
        for name, each in tensors_in(state.get("optimizer"), rank).items()
    }
    return args, entries, others, holds_optimizer


def _unread(model: Any) -> str:
    """What a rank has instead of the named tensors of Megatron Core; empty where it has those."""
    if model is None:
        return "no `model`, or virtual pipeline stages (model0, model1)"
    if "language_model" in model:
        return "Megatron's legacy model (model.language_model), from before Megatron Core"
    for name, each in model.items():
        if not _NO_WEIGHTS.search(name) and not isinstance(each, Tensor):
            return f"a {type(each).__name__} at model.{name}, where a tensor is expected"
    return ""


def _alike(path: Path, key: str, values: Mapping[str, Any]) -> None:
    """
    Raises:
        CheckpointError: `M012`, the files of ranks have different values.
    """
    ranks: dict[str, list[str]] = {}
    for name, value in values.items():
        ranks.setdefault(str(getattr(value, "made_of", value)), []).append(name)
    if len(ranks) > 1:
        each = "; ".join(f"{value} in {', '.join(names[:4])}" for value, names in ranks.items())
        raise not_whole(path, f"its ranks' files differ in {key}: {each}")


def _known(args: Any, path: Path) -> Any:
    lost = [name for name in _NEEDED if not hasattr(args, name)]
    if lost:
        raise CheckpointError.of(
            code="C012",
            what=f"layout not read: {path.name} lacks arguments of its model: {', '.join(lost)}",
            where=str(path),
            fix="give a folder that Megatron-LM's own training wrote",
        )
    return args


def _dim_shared(name: str) -> int | None:
    """The dimension of a tensor that tensor ranks share; None where each has a copy of it."""
    if "layer_norm" in name:  # fused into linear_qkv and linear_fc1
        return None
    return 1 if name.endswith(_ROWS) else 0 if any(each in name for each in _COLUMNS) else None


def _check_copies(path: Path, name: str, copies: Mapping[str, Tensor]) -> None:
    """
    Raises:
        CheckpointError: `M012`, a rank's copy of a tensor is another than the first's.
    """
    (first, whole), *rest = copies.items()
    bits = whole.contiguous().view(torch.uint8)
    for rank, copy in rest:
        if copy.shape != whole.shape or not torch.equal(copy.contiguous().view(torch.uint8), bits):
            raise not_whole(path, f"the copies of {name} differ, in {first} and {rank}")


def _joined(name: str, parts: Sequence[Tensor], dim: int | None, *, halves: bool) -> Entry:
    first = parts[0]
    if len(parts) == 1 or dim is None:
        return entry(first)
    shape = list(first.shape)
    shape[dim] *= len(parts)
    is_gated = halves and "linear_fc1." in name

    def load() -> Tensor:
        if not is_gated:
            return torch.cat(list(parts), dim)
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])

    return Entry(first.dtype, tuple(shape), load)


def _llama(
    name: str, each: Entry, groups: int, queries: int, width: int
) -> dict[str, Entry] | None:
    if name in _LLAMA:
        return {_LLAMA[name]: each}
    kind = name.rpartition(".")[2]
    if name.startswith("self_attention.linear_qkv."):
        sizes = {"q_proj": queries, "k_proj": 1, "v_proj": 1}
        starts = {"q_proj": 0, "k_proj": queries, "v_proj": queries + 1}
        rest = each.shape[1:]
        return {
            f"self_attn.{part}.{kind}": Entry(
                each.dtype,
                (groups * size * width, *rest),
                partial(_heads, each, groups, slice(starts[part], starts[part] + size), width),
            )
            for part, size in sizes.items()
        }
    if name == "mlp.linear_fc1.weight":
        half = (each.shape[0] // 2, each.shape[1])
        return {
            f"mlp.{part}.weight": Entry(each.dtype, half, partial(_half, each, number))
            for number, part in enumerate(("gate_proj", "up_proj"))
        }
    return None


def _heads(each: Entry, groups: int, part: slice, width: int) -> Tensor:
    """Query, key or value out of groups of heads: (group, heads of it + 2, width) rows."""
    whole, rest = each.load(), each.shape[1:]
    return whole.view(groups, -1, width, *rest)[:, part].reshape(-1, *rest).contiguous()


def _half(each: Entry, number: int) -> Tensor:
    return each.load().chunk(2)[number].clone()


def _gpt2(name: str, each: Entry, groups: int, width: int) -> dict[str, Entry] | None:
    is_matrix = len(each.shape) == 2 and "embedding" not in name
    shape = each.shape[::-1] if is_matrix else each.shape
    if name.startswith("self_attention.linear_qkv."):

        def fused() -> Tensor:
            parts = [_heads(each, groups, slice(n, n + 1), width) for n in range(3)]
            whole = torch.cat(parts)
            return whole.T.contiguous() if is_matrix else whole

        return {f"attn.c_attn.{name.rpartition('.')[2]}": Entry(each.dtype, shape, fused)}
    for ours, theirs in _GPT2.items():
        if name.startswith(ours):
            load = (lambda: each.load().T.contiguous()) if is_matrix else each.load
            return {theirs + name.removeprefix(ours): Entry(each.dtype, shape, load)}
    return None


def _dtype(entries: Mapping[str, Entry]) -> str:
    return str(next(iter(entries.values())).dtype).removeprefix("torch.")


def _llama_config(args: Any, entries: Mapping[str, Entry], has_bias: bool) -> dict[str, Any]:
    heads = int(args.num_attention_heads)
    groups = args.num_query_groups if getattr(args, "group_query_attention", False) else heads
    return {
        "architectures": ["Qwen2ForCausalLM" if has_bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if has_bias else "llama",
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": getattr(args, "kv_channels", None) or args.hidden_size // heads,
        "vocab_size": entries["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": getattr(args, "norm_epsilon", 1e-5),
        "rope_theta": float(getattr(args, "rotary_base", 10000)),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "hidden_act": "silu",
        "dtype": _dtype(entries),
    }


def _gpt2_config(args: Any, entries: Mapping[str, Entry], has_bias: bool) -> dict[str, Any]:
    tanh = getattr(args, "openai_gelu", False) or getattr(args, "bias_gelu_fusion", True)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": args.hidden_size,
        "n_inner": args.ffn_hidden_size,
        "n_layer": args.num_layers,
        "n_head": args.num_attention_heads,
        "vocab_size": entries["transformer.wte.weight"].shape[0],
        "n_positions": entries["transformer.wpe.weight"].shape[0],
        "layer_norm_epsilon": getattr(args, "norm_epsilon", 1e-5),
        "activation_function": "gelu_new" if tanh else "gelu",
        "tie_word_embeddings": True,
        "dtype": _dtype(entries),
    }
