"""The same tiny job for every engine that runs here: same model, data, seed and batch."""

import json
from array import array
from pathlib import Path
from typing import Any

from tests.render.plans import rendered

from paceline.render import Rendered


def tiny(
    engine: str,
    ranks: int,
    *,
    nodes: int = 1,
    accelerator: str = "H100-SXM",
    precision: str = "fp32",
    states: str = "auto",
    cluster: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **layout: Any,
) -> Rendered:
    """The files of an engine for six steps on `ranks` ranks of each node, with the layout's fields
    fixed."""
    asks_engine = states != "auto" or "mlx_backend" in (cluster or {})
    return rendered(
        engine,
        **({"engine": engine} if asks_engine else {}),
        model=model or {"decoder": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}},
        data={"seq_len": 32} | (data or {}),
        cluster={"accelerator": accelerator, "nodes": nodes, "per_node": ranks} | (cluster or {}),
        train={
            "global_batch": 16,
            "steps": 6,
            "precision": precision,
            "states": states,
            "schedule": "constant",
            "learning_rate": 0.003,
        },
        layout={"micro_batch": 2} | layout,
        checkpoint={"every": 3},
    )


SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True, "rope_theta": 5e4},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    },
}
"""Small models of Hugging Face by their `model_type`."""

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel", "mixtral": "MixtralForCausalLM"}


def model_folder(kind: str, folder: Path) -> dict[str, Any]:
    """The section `model` of a job: a config.json of `CONFIGS` in a folder."""
    folder.mkdir(parents=True)
    config = CONFIGS[kind] | {"architectures": [_CLASSES[kind]]}
    (folder / "config.json").write_text(json.dumps(config))
    return {"decoder": None, "hf_config": str(folder / "config.json")}


def token_file(folder: Path) -> dict[str, Any]:
    """The section `data` of a job: a file of tokens."""
    path = folder / "corpus.bin"
    path.write_bytes(array("H", [number * number % 251 for number in range(9000)]).tobytes())
    return {"corpus": None, "path": str(path), "kind": "tokens"}
