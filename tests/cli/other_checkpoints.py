"""Checkpoints as other programs write them: by the real libraries where they are installed, else in
their form, each with the source that it follows."""

import argparse
from collections import OrderedDict
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

PROMPT, ANSWER = "a b", "c"
MOMENTS = ("exp_avg", "exp_avg_sq")
WORDS = ["<unk>", *"abcdefghijklmno"]
SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}


def llama(folder: Path, *, shard: str = "5GB", tied: bool = False, kind: str = "Llama") -> Any:
    """A model of transformers and its tokenizer, saved by them."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**LLAMA, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer(folder)
    return model


def tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)


def adapter(folder: Path, base: Path, **settings: Any) -> Any:
    """A LoRA adapter, saved by peft, whose B is not zero."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = {"target_modules": ["q_proj", "down_proj"]} | settings
    config = peft.LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", **settings)
    made = peft.get_peft_model(model, config)
    torch.manual_seed(2)
    for name, each in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.1)
    made.save_pretrained(folder)
    return made


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def as_dcp(folder: Path, tree: Any) -> None:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)


def moments(state: dict[str, torch.Tensor], steps: float = 7.0) -> dict[str, dict[str, Any]]:
    """Adam's state of each parameter, other numbers in each."""
    made = {}
    for number, (name, each) in enumerate(sorted(state.items()), 1):
        value = each.float()
        made[name] = {
            "exp_avg": value * number,
            "exp_avg_sq": value.square() + number,
            "step": torch.tensor(steps),
        }
    return made


def zero(
    root: Path,
    state: dict[str, torch.Tensor],
    *,
    stage: int,
    ranks: int,
    adam: dict[str, dict[str, Any]] | None = None,
    elastic: bool = False,
) -> Path:
    """A ZeRO step of DeepSpeed 0.19.6: keys by runtime/engine.py `_save_checkpoint` and
    `_save_zero_checkpoint`, the flat groups by runtime/zero/stage_1_and_2.py and stage3.py, as
    utils/zero_to_fp32.py reads them. Two groups, as weight decay makes them, and a buffer."""
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    trained = {name: each for name, each in state.items() if name != "steps"}
    groups = [{}, {}]
    for name, each in trained.items():
        groups[each.dim() < 2][name] = each.float()
    shapes = [OrderedDict((name, each.shape) for name, each in group.items()) for group in groups]
    side = {
        "module": {name: each.bfloat16() for name, each in trained.items()} if stage < 3 else {},
        "buffer_names": [],
        "param_shapes": shapes,
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "ds_version": "0.19.6",
        "ds_config": {"zero_optimization": {"stage": stage}},
        "args": argparse.Namespace(seed=1),
    }
    cut = _third if stage == 3 else _second
    for rank in range(ranks):
        flat = [cut(group, rank, ranks) for group in groups]
        optimizer = {
            "zero_stage": stage,
            "partition_count": ranks if stage == 3 else [ranks, ranks],
            "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": flat,
        }
        if adam is not None:
            kept = [
                {key: cut({n: adam[n][key] for n in group}, rank, ranks) for key in MOMENTS}
                for group in groups
            ]
            steps = next(iter(adam.values()))["step"]
            base = {n: {**each, "step": steps} for n, each in enumerate(kept)}
            own = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
            optimizer[own] = kept if elastic else {"state": base, "param_groups": []}
            if elastic:
                optimizer["base_optimizer_state_step"] = int(steps)
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, folder / f"{name}_optim_states.pt")
        if stage == 3:
            torch.save(side, folder / f"{name}_model_states.pt")
    if stage < 3:
        torch.save(side, folder / "mp_rank_00_model_states.pt")
    return folder


def _second(group: dict[str, torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
    row = torch.cat([each.reshape(-1) for each in group.values()])
    align = 2 * ranks
    row = torch.nn.functional.pad(row, (0, ceil(row.numel() / align) * align - row.numel()))
    return row.chunk(ranks)[rank].clone()


def _third(group: dict[str, torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
    parts = []
    for each in group.values():
        size = ceil(each.numel() / ranks)
        row = torch.nn.functional.pad(each.reshape(-1), (0, size * ranks - each.numel()))
        parts.append(row[rank * size : (rank + 1) * size])
    return torch.cat(parts).clone()


def universal(folder: Path, state: dict[str, torch.Tensor], *, flat: bool) -> Path:
    """As DeepSpeed 0.19.6, checkpoint/ds_to_universal.py: `merge_tp_slices` writes tables with
    `param`, `merge_zero3_slices` rows without a shape."""
    for name, each in state.items():
        (folder / "zero" / name).mkdir(parents=True)
        value = each.float().reshape(-1) if flat else {"param": each.float(), "cat_dim": 0}
        torch.save(value, folder / "zero" / name / "fp32.pt")
    shapes = [OrderedDict((name, each.shape) for name, each in state.items())]
    side = {"module": {}, "param_shapes": shapes, "universal_checkpoint_info": {}}
    torch.save(side, folder / "mp_rank_00_model_states.pt")
    return folder


def arguments(**changes: Any) -> argparse.Namespace:
    """Megatron's, of the Llama above, with one of its own enums among them."""
    return argparse.Namespace(
        **{
            "num_layers": 2,
            "hidden_size": 8,
            "ffn_hidden_size": 24,
            "num_attention_heads": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
            "kv_channels": 2,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "norm_epsilon": 1e-6,
            "rotary_base": 10000,
            "max_position_embeddings": 32,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            **changes,
        }
    )


def to_megatron(state: dict[str, torch.Tensor], layers: int = 2) -> dict[str, torch.Tensor]:
    """The Llama's weights as Megatron-core has them with Transformer Engine. Source: Megatron-LM,
    tools/checkpoint/schema_core.py (names), core/transformer/attention.py (order of heads)."""
    made = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(layers):
        has, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (state[f"{has}self_attn.{each}_proj.weight"] for each in "qkv")
        rows = []
        for group in range(2):  # two query heads, their key and their value, each of two rows
            rows += [q[group * 4 : group * 4 + 4], k[group * 2 :][:2], v[group * 2 :][:2]]
        made |= {
            f"{to}self_attention.linear_qkv.weight": torch.cat(rows),
            f"{to}self_attention.linear_qkv.layer_norm_weight": state[
                f"{has}input_layernorm.weight"
            ],
            f"{to}self_attention.linear_proj.weight": state[f"{has}self_attn.o_proj.weight"],
            f"{to}mlp.linear_fc1.weight": torch.cat(
                [state[f"{has}mlp.gate_proj.weight"], state[f"{has}mlp.up_proj.weight"]]
            ),
            f"{to}mlp.linear_fc1.layer_norm_weight": state[f"{has}post_attention_layernorm.weight"],
            f"{to}mlp.linear_fc2.weight": state[f"{has}mlp.down_proj.weight"],
        }
    return made


def torch_dist(
    root: Path,
    state: dict[str, torch.Tensor],
    *,
    moment: torch.Tensor | None = None,
    **changes: Any,
) -> Path:
    """As Megatron-core's torch_dist: the layers of one kind stacked, arguments in common.pt."""
    folder = root / "iter_0000005"
    whole = to_megatron(state)
    tree = {name: each for name, each in whole.items() if ".layers." not in name}
    for name in [each.removeprefix("decoder.layers.0.") for each in whole if ".layers.0." in each]:
        both = [whole[f"decoder.layers.{layer}.{name}"] for layer in range(2)]
        tree[f"decoder.layers.{name}"] = torch.stack(both)
    moments = torch.zeros(16, 8) if moment is None else moment
    tree["optimizer.state.exp_avg.embedding.word_embeddings.weight"] = moments
    tree["decoder.layers.self_attention.core_attention._extra_state/shard_0_2"] = 1
    as_dcp(folder, tree)
    torch.save({"args": arguments(**changes), "iteration": 5}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def legacy(root: Path, state: dict[str, torch.Tensor], *, tensor: int, pipeline: int) -> Path:
    """As Megatron-LM's `torch` form: training/checkpointing.py, `get_checkpoint_name`."""
    folder = root / "iter_0000005"
    whole = to_megatron(state)
    for stage in range(pipeline):
        mine = {}
        for name, each in whole.items():
            if ".layers." in name:
                layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
                if int(layer) * pipeline // 2 == stage:
                    mine[f"decoder.layers.{int(layer) - stage * 2 // pipeline}.{rest}"] = each
            elif stage == (0 if "embedding" in name else pipeline - 1):
                mine[name] = each
        for rank in range(tensor):
            name = f"mp_rank_{rank:02}" + (f"_{stage:03}" if pipeline > 1 else "")
            (folder / name).mkdir(parents=True)
            parts = {key: _part(key, each, rank, tensor) for key, each in mine.items()}
            degrees = {
                "tensor_model_parallel_size": tensor,
                "pipeline_model_parallel_size": pipeline,
            }
            args = arguments(**degrees)
            saved = {"args": args, "iteration": 5, "model": parts, "optimizer": {}}
            torch.save(saved, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def gpt2(folder: Path) -> Any:
    """A GPT-2 of transformers."""
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=16, n_positions=32, n_embd=8, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    for name, each in model.named_parameters():  # transformers begins with zero biases
        if name.endswith("bias"):
            torch.nn.init.normal_(each)
    model.save_pretrained(folder)
    return model


def legacy_gpt2(root: Path, state: dict[str, torch.Tensor]) -> Path:
    """A GPT-2 in Megatron-core's names without Transformer Engine (schema_core.py,
    `CoreLocalSchema`): query, key and value head by head, matrices of output x input features."""
    made = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
    }
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "pre_mlp_layernorm",
        "attn.c_proj": "self_attention.linear_proj",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for kind in ("weight", "bias"):
        made[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for layer in range(2):
            has, to = f"transformer.h.{layer}.", f"decoder.layers.{layer}."
            for theirs, ours in names.items():
                each = state[f"{has}{theirs}.{kind}"]
                made[f"{to}{ours}.{kind}"] = each.T.contiguous() if each.dim() == 2 else each
            fused = state[f"{has}attn.c_attn.{kind}"].T  # (query, key, value) x (head, width)
            rows = fused.reshape(3, 4, 2, *fused.shape[1:]).transpose(0, 1)
            made[f"{to}self_attention.linear_qkv.{kind}"] = rows.reshape(fused.shape).contiguous()
    args = arguments(
        ffn_hidden_size=32,
        group_query_attention=False,
        num_query_groups=1,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        swiglu=False,
        add_bias_linear=True,
        norm_epsilon=1e-5,
        untie_embeddings_and_output_weights=False,
    )
    (root / "iter_0000005/mp_rank_00").mkdir(parents=True)
    saved = {"args": args, "iteration": 5, "model": made}
    torch.save(saved, root / "iter_0000005/mp_rank_00/model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


def _part(name: str, each: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    if "norm" in name:
        return each.clone()
    if "fc1" in name:
        return torch.cat([half.chunk(ranks)[rank] for half in each.chunk(2)]).clone()
    dim = 1 if "linear_proj" in name or "fc2" in name else 0
    return each.chunk(ranks, dim)[rank].clone()


def num_parameters(state: dict[str, torch.Tensor]) -> int:
    return sum(prod(each.shape) for each in state.values())
