"""Runs of small models as they are on a disk after some steps, made without training."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from paceline.job import parse_job
from paceline.plan import plan_job
from paceline.prepare import find_data
from paceline.record.run import RunFolder, create_run
from paceline.runtime.checkpoint.state_files import write_state
from paceline.runtime.models import make_model
from paceline.runtime.state import Stored, model_state

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
    | {"n_positions": 64},
    "mixtral": {"model_type": "mixtral", **_SIZES, "num_local_experts": 4},
}


def write_base(folder: Path, name: str, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder of trained weights as `save_pretrained` writes it, with a card and a licence."""
    config = dict(CONFIGS[name])
    torch.manual_seed(5)
    read = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# Base\n")
    (folder / "LICENSE").write_text("its text")
    return folder


def write_run(folder: Path, model: str, *, adapter: bool = False, step: int = 20) -> RunFolder:
    """A run of a job with `model: MODEL`, and its checkpoint of one step."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (folder / f"text/{number}.txt").write_text(f"This is text number {number}. " * 60)
    lora = "  adapter: {kind: lora, rank: 4, targets: all}\n" if adapter else ""
    text = (
        f"model: {model}\ndata: {{path: text, seq_len: 32, held_out: 0.3}}\n"
        "cluster: {accelerator: cpu, per_node: 2}\n"
        f"train:\n  global_batch: 4\n  steps: 40\n{lora}"
    )
    job = parse_job(text, source="job.yaml", folder=folder)
    plan = plan_job(job)
    run = create_run(job, plan, folder=folder / "run", runs=folder, data=find_data(job))
    torch.manual_seed(7)
    module = make_model(job, plan.decoder)()
    values = {}
    for name, stored in model_state(module).items():
        assert isinstance(stored, Stored)
        ((_, tensor),) = stored.pieces
        values[name] = partial(_same, tensor.detach() + torch.randn_like(tensor) * 0.1)
    write_state(run.checkpoints, values, step)
    return run


def _same(value: Tensor) -> Tensor:
    return value
