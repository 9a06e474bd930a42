"""`train.attention`: the kernel that a job names is priced, written, or refused."""

import json
import re
from typing import Any

import pytest
from tests.render.plans import planned, rendered

from paceline.errors import PlanError
from paceline.render import check_files

LLAMA: dict[str, Any] = {
    "model": {"preset": "llama-3-8b", "decoder": None},
    "data": {"path": "x", "corpus": None, "seq_len": 8192},
    "cluster": {"nodes": 1},
    "layout": {"sharding": "zero2", "recompute": "full", "micro_batch": 1},
}
MEGATRON = {**LLAMA, "layout": {"sharding": "zero1", "recompute": "full", "micro_batch": 1}}


def asked(engine: str, attention: str, **changes: Any) -> dict[str, Any]:
    job = MEGATRON if engine.startswith("megatron") else LLAMA
    return {
        **job,
        "engine": engine,
        "train": {"attention": attention, "precision": "auto"},
        **changes,
    }


def written(engine: str, attention: str) -> str:
    to = "accelerate" if engine == "fsdp1" else engine
    files = rendered(to, **asked(engine, attention)).files
    if "train.json" in files:
        return str(json.loads(files["train.json"])["attention"])
    text = files.get("paceline_job.py") or files.get("recipe.py") or files["arguments.txt"]
    found = re.search(r"(?:attn_backend=|AttnBackend\.|--attention-backend )\W?(\w+)", text)
    return "" if found is None else found[1]


@pytest.mark.parametrize(
    ("engine", "kernels"),
    [
        ("megatron", {"auto": "", "flash": "flash", "fused": "fused", "unfused": "unfused"}),
        ("megatron-bridge", {"auto": "", "flash": "flash", "fused": "fused", "unfused": "unfused"}),
        ("torchtitan", {"auto": "flex", "flex": "flex", "flash": "varlen"}),
        ("deepspeed", {name: name for name in ("auto", "flash", "fused", "unfused")}),
        ("accelerate", {name: name for name in ("auto", "flash", "fused", "unfused")}),
        ("fsdp1", {name: name for name in ("auto", "flash", "fused", "unfused")}),
    ],
)
def test_the_kernel_that_is_asked_for_is_in_the_engines_files(engine, kernels):
    assert {asked: written(engine, asked) for asked in kernels} == kernels


@pytest.mark.parametrize(
    ("engine", "kernel"),
    [("torchtitan", "fused"), ("megatron", "flex"), ("deepspeed", "flex"), ("paceline", "flash")],
)
def test_a_kernel_that_an_engine_cannot_be_asked_for_is_refused_with_those_that_can(engine, kernel):
    with pytest.raises(PlanError, match=f"train.attention is {kernel}, and {engine}") as caught:
        planned(**asked(engine, kernel, layout={}))
    others = caught.value.problems[0].fix.partition(": ")[2].split(", ")
    assert others
    assert engine not in others


@pytest.mark.parametrize(
    ("engine", "kernel", "changes", "why"),
    [
        ("deepspeed", "fused", {"cluster": {"accelerator": "MI300X"}}, "NVIDIA's GPUs"),
        ("accelerate", "flash", {"cluster": {"accelerator": "V100-32"}}, "Ampere"),
        ("accelerate", "unfused", {"layout": {"context": 2}}, "scaled_dot_product_attention alone"),
        ("torchtitan", "flash", {"layout": {"context": 2}}, "takes whole samples"),
    ],
)
def test_a_kernel_that_the_plans_ranks_do_not_have_is_refused_before_they_start(
    engine, kernel, changes, why
):
    small = {}
    job = {**asked(engine, kernel), "model": small, "layout": {}, **changes}
    plan, job = planned(**job)
    refused = [each for each in check_files(plan, job) if each.where.startswith("train.attention")]
    assert [why in each.what for each in refused] == [True]
    without = {**changes, "train": {"precision": "auto"}}
    plan, job = planned(**{**asked(engine, kernel), "model": small, "layout": {}, **without})
    assert not [each for each in check_files(plan, job) if "attention" in each.where]


def priced(engine: str, kernel: str, **changes: Any) -> tuple[float, float]:
    """Bytes of activations and seconds of computing."""
    price = planned(**asked(engine, kernel, **changes))[0].estimate
    return price.memory.parts["activations"] or 0, price.terms["compute"]


@pytest.mark.parametrize(
    ("engine", "layout", "score_bytes"),
    [
        ("deepspeed", {"sharding": "zero2"}, 6),
        ("accelerate", {"sharding": "full"}, 6),
        ("megatron", {"sharding": "zero1", "tensor": 2, "pipeline": 1}, 2),
    ],
)
def test_unfused_attention_keeps_the_scores_of_every_block_and_takes_longer(
    engine, layout, score_bytes
):
    layout = {**layout, "recompute": "none", "micro_batch": 1}
    data = {"path": "x", "corpus": None, "seq_len": 2048}
    flash, unfused = (
        priced(engine, kernel, data=data, layout=layout) for kernel in ("flash", "unfused")
    )
    blocks = heads = 32
    scores = blocks * heads * 2048 * 2048 / layout.get("tensor", 1)
    assert unfused[0] - flash[0] == pytest.approx(score_bytes * scores, rel=0.01)
    assert unfused[1] > 1.05 * flash[1]


def test_a_newer_kernel_is_faster():
    assert priced("deepspeed", "fused")[1] < priced("deepspeed", "flash")[1]
    assert priced("torchtitan", "auto") == priced("torchtitan", "flex")


@pytest.mark.parametrize(
    ("accelerator", "is_faster"), [("A100-SXM-80GB", False), ("H100-SXM", True)]
)
def test_flex_is_faster_than_flash_on_hopper_alone(accelerator, is_faster):
    cluster = {"nodes": 1, "accelerator": accelerator}
    flash, flex = (priced("torchtitan", kernel, cluster=cluster)[1] for kernel in ("flash", "flex"))
    assert (flex < flash) == is_faster
