"""What an engine does not express is neither planned nor accepted without a word."""

from pathlib import Path

import numpy as np
import pytest

from paceline.catalog.engines import load_engines
from paceline.errors import PlanError
from paceline.job import Job, parse_job
from paceline.parallel import check_layout_choices
from paceline.parallel.abilities import Excluded, planned_engine
from paceline.parallel.candidates import candidates
from paceline.parallel.engine_laws import check_training
from paceline.parallel.layout import Layout
from paceline.parallel.table import RECOMPUTES, SHARDINGS, table_of
from paceline.plan import Plan, plan_job
from paceline.plan.search_inputs import space_of
from paceline.profile import resolve_profile
from paceline.topology import find_cluster

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: A100-40, nodes: 2, per_node: 8}
train: {global_batch: 256, steps: 100}
"""


def job_of(engine: str, *overrides: str) -> Job:
    text = f"{JOB}engine: {engine}\n"
    return parse_job(text, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def space(engine: str, *overrides: str):
    return space_of_job(job_of(engine, *overrides))


def space_of_job(job: Job):
    return space_of(job, find_cluster(job.spec.cluster, job), resolve_profile(job))


def layouts(engine: str, *overrides: str) -> list[Layout]:
    table = candidates(space(engine, *overrides))
    return [table.row(index) for index in range(len(table))]


def plan_of(engine: str, *overrides: str) -> Plan:
    return plan_job(job_of(engine, *overrides))


def refused(engine: str, *overrides: str) -> list[str]:
    job = job_of(engine, *overrides)
    return [each.what for each in check_layout_choices(job, space(engine, *overrides))]


def test_a_combination_is_a_mask_of_the_table():
    rows = [
        Layout(data=2, sharding="full", micro_batch=1, accumulation=1, recompute="selective"),
        Layout(data=2, sharding="none", micro_batch=1, accumulation=1, recompute="selective"),
        Layout(data=2, sharding="full", micro_batch=1, accumulation=1, tensor=2),
    ]
    both = Excluded(when={"sharding": ("full",), "recompute": ("selective",)}, why="")
    assert both.mask(table_of(rows)).tolist() == [True, False, False]
    several = Excluded(when={"tensor": "several", "sharding": ("full",)}, why="")
    assert several.mask(table_of(rows)).tolist() == [False, False, True]
    assert (SHARDINGS.index("full"), RECOMPUTES.index("selective")) == (3, 1)


def test_deepspeed_is_planned_without_what_its_configuration_cannot_say():
    found = layouts("deepspeed")
    assert {(each.tensor, each.context, each.expert) for each in found} == {(1, 1, 1)}
    assert {each.recompute for each in found} == {"none", "full"}
    staged = [each for each in found if each.pipeline > 1]
    assert {each.pipeline for each in staged} == {2, 4, 8, 16}
    assert {each.sharding for each in staged if each.data > 1} == {"zero1"}
    assert {each.sharding for each in staged if each.data == 1} == {"none"}
    assert {each.recompute_every for each in staged} == {1}


def test_a_pipeline_of_deepspeed_has_equal_stages():
    twelve = 'model={"decoder": {"layers": 12, "hidden": 64, "heads": 4}}'
    assert {each.pipeline for each in layouts("deepspeed", twelve)} == {1, 2, 4}
    (said,) = refused("deepspeed", twelve, "layout.pipeline=8")
    assert said == (
        "layout.pipeline 8 does not divide 12 blocks, and deepspeed has as many on each stage"
    )


def test_deepspeed_offloads_to_a_disk_and_parameters_from_stage_3_on():
    moved = layouts("deepspeed", "layout.offload=nvme", "layout.offload_path=/disk")
    assert {each.sharding for each in moved} == {"full"}
    assert {each.offload_parameters for each in moved} == {False, True}
    on_host = layouts("deepspeed", "layout.offload=cpu")
    assert {each.sharding for each in on_host if each.offload_parameters} == {"full"}
    assert {each.sharding for each in on_host} == {"zero1", "zero2", "full"}
    assert {each.pipeline for each in on_host} == {1}


@pytest.mark.parametrize("engine", ["paceline", "torchtitan", "accelerate", "fsdp1"])
def test_fsdp_moves_parameters_with_the_optimizer(engine):
    moved = layouts(engine, "layout.offload=cpu")
    assert {each.offload_parameters for each in moved} == {True}
    assert not any(each.offload_parameters for each in layouts(engine, "layout.offload=none"))
    (said,) = refused(engine, "layout.offload=cpu", "layout.offload_parameters=false")
    assert f"which {engine} cannot do: they move with the optimizer state" in said


def test_one_gpu_offloads_with_deepspeed_as_with_zero_of_one_rank():
    one = 'cluster={"accelerator": "RTX-4090", "per_node": 1}'
    plan = plan_of("deepspeed", one, "train.global_batch=8")
    assert (plan.layout.offload, plan.layout.shard_degree) == ("cpu", 1)
    assert plan.layout.sharding != "none"
    assert plan.estimate.memory.known_bytes <= plan.limit_bytes
    assert plan.estimate.terms["data"] > 0  # parameters are copied for every pass
    (said,) = refused("accelerate", one, "layout.offload=cpu")
    assert said.startswith("layout.offload is cpu, which accelerate does only with what is sharded")
    assert refused("deepspeed", one, "layout.offload=cpu", "layout.sharding=none")
    assert not refused("deepspeed", one, "layout.offload=cpu", "layout.sharding=full")


def test_parameters_that_are_asked_to_be_offloaded_take_the_optimizer_along():
    found = layouts("deepspeed", "layout.offload_parameters=true", "layout.sharding=full")
    assert {(each.offload, each.offload_parameters) for each in found} == {("cpu", True)}
    (said,) = refused("deepspeed", "layout.offload_parameters=true", "layout.offload=none")
    assert said == "layout.offload_parameters is true, and layout.offload is none"


def test_megatron_leaves_parameters_on_the_accelerator():
    (said,) = refused("megatron", "layout.offload_parameters=true")
    assert said.endswith("cannot do: it offloads optimizer state alone")
    assert not any(each.offload_parameters for each in layouts("megatron", "layout.offload=cpu"))
    assert refused("megatron", "layout.offload=cpu", "layout.offload_parameters=true")


def test_accelerate_recomputes_whole_blocks_under_fsdp_and_the_program_under_ddp():
    found = layouts("accelerate")
    sharded = {each.recompute for each in found if each.sharding != "none"}
    assert sharded == {"none", "full"}
    assert {each.recompute for each in found if each.sharding == "none"} > sharded
    assert {each.recompute_every for each in found if each.sharding != "none"} == {1}


def test_what_a_program_brings_itself_is_planned_only_where_the_job_fixes_it():
    assert {(each.tensor, each.context) for each in layouts("accelerate")} == {(1, 1)}
    assert {each.tensor for each in layouts("accelerate", "layout.tensor=2")} == {2}
    assert {each.context for each in layouts("accelerate", "layout.context=2")} == {2}
    assert {each.tensor for each in layouts("torchtitan")} == {1, 2, 4, 8}


def test_torchtitan_recomputes_every_block_and_shards_over_context_ranks():
    found = layouts("torchtitan")
    assert {each.recompute_every for each in found} == {1}
    assert not [each for each in found if each.sharding == "none" and each.context > 1]


def test_fsdp1_shares_within_nodes_or_over_all():
    hybrid = {each.shard for each in layouts("fsdp1") if each.sharding == "hybrid"}
    assert hybrid == {8}
    (said,) = refused("fsdp1", "layout.sharding=hybrid", "layout.shard=4")
    assert said.startswith("layout.shard is 4, which fsdp1 cannot do")


def test_fsdp1_accumulates_nothing_where_gradients_go_to_the_host_after_each_micro_batch():
    # torch's FSDP1 replaces the gradient on the host; inside no_sync() it adds on the accelerator.
    moved = [each for each in layouts("fsdp1", "layout.offload=cpu") if each.accumulation > 1]
    assert moved
    assert {each.sharding for each in moved} == {"full", "hybrid"}
    assert not any(each.reduce_every_micro_batch for each in moved)
    whole = layouts("fsdp1", "layout.offload=none")
    assert any(each.reduce_every_micro_batch for each in whole)
    adds = layouts("accelerate", "layout.offload=cpu")  # FSDP2 adds on the host
    assert any(each.reduce_every_micro_batch for each in adds)
    once = refused("fsdp1", "layout.offload=cpu", "layout.sharding=zero2", "layout.micro_batch=1")
    assert once == [
        "no way to divide 16 ranks and 256 samples has sharding zero2, micro_batch 1, offload cpu"
    ]


def test_ulysses_on_megatron_takes_samples_of_two_parts_a_rank():
    short = ("data.seq_len=4100", "layout.context=4", "layout.context_kind=ulysses")
    assert layouts("megatron", *short) == []
    assert layouts("megatron", "data.seq_len=4096", *short[1:])


@pytest.mark.parametrize(
    ("engine", "overrides", "said"),
    [
        (
            "deepspeed",
            ("layout.sharding=zero2", "layout.offload=nvme", "layout.offload_path=/disk"),
            "deepspeed cannot do sharding zero2 with offload nvme",
        ),
        (
            "deepspeed",
            ("layout.pipeline=2", "layout.offload=cpu"),
            "deepspeed cannot do pipeline 2 with offload cpu",
        ),
        (
            "accelerate",
            ("layout.sharding=full", "layout.recompute=selective"),
            "accelerate cannot do sharding full with recompute selective",
        ),
        (
            "torchtitan",
            ("layout.sharding=none", "layout.context=2"),
            "torchtitan cannot do sharding none with context 2",
        ),
        ("torchtitan", ("layout.recompute_every=2",), "layout.recompute_every is 2"),
        ("deepspeed", ("layout.tensor=2",), "layout.tensor is 2"),
    ],
)
def test_what_is_fixed_and_not_expressed_is_said_before_rendering(engine, overrides, said):
    found = refused(engine, *overrides)
    assert any(each.startswith(said) for each in found), found


def test_state_on_a_disk_needs_a_folder_before_rendering():
    job = job_of("deepspeed", "layout.offload=nvme")
    (problem,) = check_layout_choices(job, space("deepspeed", "layout.offload=nvme"))
    assert problem.code == "H020"
    assert problem.fix.startswith("layout.offload_path")


@pytest.mark.parametrize(
    ("engine", "override"),
    [
        ("torchtitan", "train.precision=fp16"),
        ("torchtitan", "train.optimizer=sgd"),
        ("deepspeed", "train.precision=fp8"),
        ("deepspeed", "train.optimizer=muon"),
        ("megatron", "train.optimizer=adamw-8bit"),
    ],
)
def test_a_precision_or_optimizer_that_files_cannot_ask_for_is_refused(engine, override):
    cluster = 'cluster={"accelerator": "H100-SXM", "nodes": 2, "per_node": 8}'
    with pytest.raises(PlanError, match=f"which {engine} cannot do") as refusal:
        plan_of(engine, cluster, override)
    assert [problem.code for problem in refusal.value.problems] == ["L012"]


def test_an_open_precision_is_one_that_the_engine_has():
    small = 'model={"decoder": {"layers": 4, "hidden": 64, "heads": 4}}'
    v100 = 'cluster={"accelerator": "V100-32", "per_node": 8}'
    assert plan_of("deepspeed", v100, small).precision == "fp16"
    assert plan_of("torchtitan", v100, small).precision == "fp32"


def test_a_plan_counts_what_the_files_of_its_engine_hold():
    engines = load_engines()
    assert planned_engine(engines["deepspeed"]).gradient_bytes == 4
    assert planned_engine(engines["accelerate"]).sharded_bytes == 4
    assert planned_engine(engines["megatron"]) == engines["megatron"]
    plan = plan_of("accelerate", "layout.sharding=full")
    params = plan.profile.num_parameters
    moments = plan.estimate.memory.parts["optimizer"]
    assert moments == pytest.approx(8 * params / 16, rel=0.01)


def test_offloaded_parameters_leave_the_device_for_the_host_and_cost_time():
    zero3 = ("layout.sharding=full", "layout.offload=cpu", "layout.micro_batch=1")
    alone = plan_of("deepspeed", *zero3, "layout.offload_parameters=false", "layout.recompute=full")
    moved = plan_of("deepspeed", *zero3, "layout.offload_parameters=true", "layout.recompute=full")
    params = moved.profile.num_parameters
    assert alone.estimate.memory.parts["parameters"] == pytest.approx(2 * params / 16, rel=0.01)
    assert moved.estimate.memory.parts["parameters"] == 0
    assert moved.estimate.memory.parts["gradients"] == 0
    assert alone.estimate.memory.parts["gradients"] == 0  # on the host either way, as the optimizer
    assert moved.host_bytes - alone.host_bytes == pytest.approx(2 * params / 2, rel=0.01)
    assert np.less(alone.estimate.step_s, moved.estimate.step_s)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["layout.pipeline=2"],
            "paceline or megatron or megatron-bridge or deepspeed or torchtitan",
        ),
        (
            ["layout.pipeline=2", "layout.schedule=interleaved"],
            "paceline or megatron or megatron-bridge or torchtitan",
        ),
        (["layout.pipeline=2", "cluster.accelerator=cpu"], "paceline or deepspeed"),
        (["layout.pipeline=2", "cluster.accelerator=TPU-v5p"], None),
    ],
)
def test_a_refusal_names_engines_that_train_on_these_machines_and_take_the_whole_layout(
    overrides, named
):
    """It named maxtext on A100s, and engines that Paceline writes no files for."""
    job = job_of("accelerate", *overrides)
    fixes = [each.fix for each in check_layout_choices(job, space("accelerate", *overrides))]
    ends = {fix.partition(", or set engine to ")[2] or None for fix in fixes}
    assert ends == {named}


def test_stages_that_would_divide_leave_room_for_the_other_degrees():
    job = job_of("deepspeed", "layout.pipeline=3", "layout.data=8")
    fixes = [each.fix for each in check_layout_choices(job, space_of_job(job))]
    assert fixes[0].startswith("set layout.pipeline to 1 or 2, or set engine to")


@pytest.mark.parametrize("engine", ["torchtitan", "torchtune", "accelerate"])
def test_groups_of_shards_over_context_ranks_are_whole_groups_of_them(engine):
    """4 shards of data 4 x context 3 were planned, and the files had dp_shard 4 // 3: 3 shards."""
    twelve = ("cluster.nodes=3", "cluster.per_node=4", "data.seq_len=3000", "layout.context=3")
    hybrid = ("layout.sharding=hybrid", "layout.tensor=1", "layout.pipeline=1")
    found = {each.shard_degree for each in layouts(engine, *twelve, *hybrid)}
    assert found == {3, 6}
    (what,) = refused(engine, *twelve, *hybrid, "layout.shard=4")
    assert "whole groups of 3 context ranks" in what


LORA = "train.adapter={kind: lora, rank: 16}"


def test_torchtune_s_lora_recipe_has_no_tensor_parallelism():
    """recipes/lora_finetune_distributed.py: `assert self.tp_degree == 1`."""
    assert {each.tensor for each in layouts("torchtune", LORA)} == {1}
    assert max(each.tensor for each in layouts("torchtune")) > 1
    (what,) = refused("torchtune", LORA, "layout.tensor=2")
    assert "no tensor parallelism beside an adapter" in what


def test_torchtune_is_planned_in_fp32_where_the_accelerator_has_no_bf16():
    """Each of its recipes: full fp16 training is not supported."""
    assert plan_of("torchtune", "cluster.accelerator=T4", "cluster.nodes=8").precision == "fp32"
    with pytest.raises(PlanError, match=r"train\.precision is fp16"):
        plan_of("torchtune", "train.precision=fp16", "cluster.accelerator=T4")


@pytest.mark.parametrize(
    ("field", "value", "able"),
    [
        ("compile", "true", {"paceline", "torchtitan"}),
        ("gradient_compression", "bf16", {"paceline", "megatron"}),
        ("gradient_compression", "powersgd", {"paceline"}),
    ],
)
@pytest.mark.parametrize(
    "engine", ["paceline", "torchtitan", "megatron", "deepspeed", "accelerate", "fsdp1"]
)
def test_what_an_engine_s_files_do_not_do_is_not_in_its_price(
    field: str, value: str, able: set[str], engine: str
):
    """It was in the time of a step, and a note on stderr said that the files cannot express it."""
    job = job_of(engine, f"train.{field}={value}", "layout.sharding=none")
    cluster = find_cluster(job.spec.cluster, job)
    found = list(check_training(job, space_of_job(job).abilities, cluster.backend))
    assert bool(found) == (engine not in able)
    for problem in found:
        assert problem.where == f"train.{field}, --set"
        assert able <= set(problem.fix.replace(",", "").split())
