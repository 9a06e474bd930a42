"""Megatron Core's own classes read what its files say. It trains on GPUs only: nothing is run."""

import json
import subprocess

import pytest
from tests.engines.runs import write_files
from tests.render.plans import planned
from tests.render.test_megatron import FULL, THREE_WAYS, llama

from paceline.render import render_job
from paceline.render.megatron_words import model_words, parallel_words, stage_blocks

READ = """
import json, sys
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

words = json.load(sys.stdin)
words["activation_func"] = torch.nn.functional.silu
words["bf16"] = True
words["params_dtype"] = words["pipeline_dtype"] = torch.bfloat16
config = TransformerConfig(**words)
found = {name: getattr(config, name) for name in words if name not in
         ("activation_func", "params_dtype", "pipeline_dtype", "bf16")}
layout = found.pop("pipeline_model_parallel_layout", None)
if layout is not None:
    layout.validate_layer_layout(config.num_layers, None)
    pipeline = config.pipeline_model_parallel_size
    found["stages"] = [
        str(layout.layout[stage % pipeline][stage // pipeline]).count("decoder")
        for stage in range(len(layout.layout) * len(layout.layout[0]))
    ]
print(json.dumps(found, default=str))
"""


@pytest.mark.engine(validated="megatron-core's TransformerConfig and pipeline layout")
@pytest.mark.parametrize(
    "changes",
    [
        {"layout": THREE_WAYS},
        {"layout": THREE_WAYS, "engine": "paceline"},
        {"layout": FULL, "engine": "paceline"},
        {"layout": {"context": 2, "tensor": 2, "sharding": "zero1"}},
        {
            "model": {"decoder": None, "preset": "mixtral-8x7b"},
            "layout": {"expert": 8, "tensor": 2, "pipeline": 2, "sharding": "zero1"},
        },
    ],
    ids=["three-ways", "uneven-stages", "fsdp", "context", "experts"],
)
def test_megatron_core_takes_every_word_and_keeps_its_value(python_with, changes):
    python = python_with("megatron-core", "torch")
    plan, job = planned(**llama(**changes))
    words = model_words(plan, job) | parallel_words(plan)
    done = subprocess.run(
        [python, "-c", READ], input=json.dumps(words), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    stages = found.pop("stages", None)
    assert stages is None or stages == list(stage_blocks(plan))
    assert found == {name: words[name] for name in found}
    assert set(words) - set(found) <= {"pipeline_model_parallel_layout"}


READ_RECIPE = """
import importlib.abc, importlib.machinery, json, os, sys, types
from unittest.mock import MagicMock
import torch


class Names(types.ModuleType):
    __version__ = "2.10.0"
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (torch.nn.Module,), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    '''Libraries of CUDA kernels, which need a GPU to be installed: only their names are read.'''

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformer_engine", "transformer_engine_torch", "mamba_ssm"}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Names(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, StandIn())
sys.path.insert(0, ".")
os.environ["MOCK_DATA"] = "1"
import recipe

found = recipe.config()
model = found.model
model.finalize() if hasattr(model, "finalize") else None
found.ddp.finalize()
found.optimizer.finalize()
print(json.dumps({
    "data": found.get_data_parallel_size(32),
    "layers": model.num_layers,
    "vocabulary": model.vocab_size,
    "batch": found.train.global_batch_size,
    "fsdp": found.ddp.use_megatron_fsdp,
    "kept": found.checkpoint.most_recent_k,
}))
"""


@pytest.mark.engine(
    "megatron-bridge", validated="its config classes, Transformer Engine stood in for"
)
@pytest.mark.parametrize(
    "changes",
    [{"layout": THREE_WAYS}, {"layout": FULL, "engine": "paceline"}],
    ids=["three-ways", "fsdp"],
)
def test_megatron_bridge_takes_every_word(python_with, tmp_path, changes):
    python = python_with("megatron-bridge", "megatron-core", "torch")
    plan, job = planned(**llama(**changes))
    write_files(render_job("megatron-bridge", plan, job).files, tmp_path)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", READ_RECIPE], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "data": plan.layout.data,
        "layers": 32,
        "vocabulary": 128256,
        "batch": 64,
        "fsdp": plan.layout.sharding == "full",
        "kept": 3,
    }
