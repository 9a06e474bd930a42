"""torchtitan's own parser and classes read its files. It trains on GPUs only: nothing is run."""

import json
import subprocess

import pytest
from tests.engines.runs import write_files
from tests.render.plans import planned
from tests.render.test_torchtitan import FULL, THREE_WAYS, titan

from paceline.render import render_job

READ = """
import json
import torch
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims

config = ConfigManager().parse_args(["--module", "paceline_job", "--config", "job"])
with torch.device("meta"):
    model = config.model_spec.model.build()
ways = config.parallelism
dims = ParallelDims(
    dp_replicate=ways.data_parallel_replicate_degree,
    dp_shard=ways.data_parallel_shard_degree,
    cp=ways.context_parallel_degree,
    tp=ways.tensor_parallel_degree,
    pp=ways.pipeline_parallel_degree,
    ep=ways.expert_parallel_degree,
    world_size=32,
)
names = set(dict(model.named_modules()))
parts = ways.module_fqns_per_model_part or []
get_schedule_class(ways.pipeline_parallel_schedule)
print(json.dumps({
    "parameters": sum(each.numel() for each in model.parameters()),
    "unknown": [name for part in parts for name in part if name not in names],
    "stages": len(parts),
    "ranks": dims.dp_replicate * dims.dp_shard * dims.cp * dims.tp * dims.pp,
    "batch": config.training.global_batch_size,
    "seq_len": config.training.seq_len,
}))
"""


@pytest.mark.engine(validated="torchtitan's parser and config, the model built on the meta device")
@pytest.mark.parametrize(
    ("layout", "preset"),
    [
        (THREE_WAYS, "llama-3-8b"),
        (FULL, "llama-3-8b"),
        ({"sharding": "hybrid", "shard": 8, "data": 32}, "llama-3-8b"),
        ({"sharding": "full", "context": 2, "tensor": 2}, "llama-3-8b"),
        ({"pipeline": 4, "schedule": "zero-bubble", "recompute": "full"}, "llama-3-8b"),
        ({"expert": 8, "tensor": 2, "sharding": "full"}, "qwen3-30b-a3b"),
        ({"tensor": 2, "sharding": "full"}, "qwen3-0.6b"),
    ],
    ids=["three-ways", "fsdp", "hsdp", "context", "zero-bubble", "experts", "qwen"],
)
def test_torchtitan_builds_the_plans_model_and_mesh(python_with, tmp_path, layout, preset):
    python = python_with("torchtitan", "torch")
    plan, job = planned(**titan(layout=layout, model={"preset": preset}))
    write_files(render_job("torchtitan", plan, job).files, tmp_path)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", READ], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == plan.profile.num_parameters
    assert found["unknown"] == []
    assert found["ranks"] == 32
    assert (found["batch"], found["seq_len"]) == (64, 4096)
    expected = plan.layout.pipeline * plan.layout.chunks if plan.layout.pipeline > 1 else 0
    assert found["stages"] == expected
