import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.render.plans import rendered

from paceline.errors import JobError, PlanError
from paceline.render import RenderError


def config(**changes):
    return json.loads(rendered("deepspeed", **changes).files["ds_config.json"])


def test_s0_7_zero3_on_two_nodes(check_golden):
    check_golden("deepspeed/zero3-two-nodes", rendered("deepspeed", layout={"sharding": "full"}))


def test_zero2_with_offload_and_a_hostfile(check_golden):
    found = rendered(
        "deepspeed",
        layout={"sharding": "zero2", "offload": "cpu"},
        ssh={"hosts": ["node-a", "trainer@10.0.0.7"]},
    )
    check_golden("deepspeed/zero2-offload-hosts", found)
    assert found.files["hostfile"] == "node-a slots=8\ntrainer@10.0.0.7 slots=8\n"


@pytest.mark.parametrize(
    ("sharding", "stage"), [("none", 0), ("zero1", 1), ("zero2", 2), ("full", 3)]
)
def test_sharding_is_a_stage_of_zero(sharding, stage):
    assert config(layout={"sharding": sharding})["zero_optimization"]["stage"] == stage


def test_optimizer_state_on_nvme_has_its_folder():
    layout = {"sharding": "full", "offload": "nvme", "offload_path": "/local_nvme"}
    where = config(engine="deepspeed", layout=layout)["zero_optimization"]["offload_optimizer"]
    assert where == {"device": "nvme", "pin_memory": True, "nvme_path": "/local_nvme"}


def test_nvme_without_a_folder_is_refused():
    with pytest.raises(PlanError, match="no folder is named") as refused:
        rendered("deepspeed", engine="deepspeed", layout={"sharding": "full", "offload": "nvme"})
    assert refused.value.problems[0].code == "H020"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["node-a", "node-a"], "node-a is there twice"),
        (["node-a"], "hosts are 1, nodes 2"),
    ],
)
def test_a_hostfile_that_deepspeed_would_refuse_is_not_written(hosts, said):
    with pytest.raises(JobError, match=said) as refused:
        rendered("deepspeed", layout={"sharding": "full", "pipeline": 1}, ssh={"hosts": hosts})
    assert refused.value.problems[0].code == "H021"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 8}])
def test_without_zero_nothing_is_asked_that_deepspeed_does_not_start_with(precision, adapter):
    """`_do_optimizer_sanity_check` of runtime/engine.py (0.19.8): without ZeRO the type of
    accumulation is the model's own."""
    train = {"precision": precision} | ({"adapter": adapter} if adapter else {})
    found = rendered("deepspeed", train=train, layout={"sharding": "none"})
    values = json.loads(found.files["ds_config.json"])
    assert values["zero_optimization"]["stage"] == 0
    assert values[precision]["enabled"] is True
    assert "data_types" not in values
    said = [gap.nearest for gap in found.gaps if gap.nearest and "accumulated" in gap.nearest]
    assert said == [f"float32 masters in the optimizer, gradients accumulated in {precision}"]


def test_port_goes_to_the_launcher_and_what_it_has_no_option_for_is_said():
    found = rendered(
        "deepspeed",
        layout={"sharding": "full"},
        ssh={
            "hosts": ["node-a", "node-b", "spare-c"],
            "port": 2222,
            "identity": "/keys/of team",
            "config": "/keys/config",
            "python": "/opt/bin/python3",
        },
    )
    assert " --ssh_port=2222 " in found.files["launch-hosts.sh"]
    assert "spare-c" not in found.files["hostfile"]
    said = [gap.what for gap in found.gaps]
    for what in (
        "spare hosts: spare-c",
        "ssh.identity: /keys/of team",
        "ssh.config: /keys/config",
        "ssh.python: /opt/bin/python3",
    ):
        assert what in said
    plain = rendered("deepspeed", layout={"sharding": "full"}, ssh={"hosts": ["node-a", "node-b"]})
    assert "ssh_port" not in plain.files["launch-hosts.sh"]
    assert not [gap for gap in plain.gaps if "ssh" in gap.what or "spare" in gap.what]


def test_precision_is_said_once_and_accumulated_in_float32():
    assert config(train={"precision": "fp32"}).keys().isdisjoint({"bf16", "fp16"})
    narrow = config(train={"precision": "bf16"}, layout={"sharding": "zero1"})
    assert narrow["bf16"] == {"enabled": True}
    assert "fp16" not in narrow
    assert narrow["data_types"] == {"grad_accum_dtype": "fp32"}


def test_no_clipping_is_zero():
    assert config(train={"clip_norm": 0.5})["gradient_clipping"] == 0.5
    assert config(train={"clip_norm": None})["gradient_clipping"] == 0.0


def test_s1_9_blocks_are_recomputed_by_deepspeeds_own_checkpointing():
    assert "activation_checkpointing" in config(layout={"recompute": "full"})
    assert "activation_checkpointing" not in config(layout={"recompute": "none"})


def test_checkpointing_is_set_up_for_as_many_blocks_as_are_recomputed():
    every = config(layout={"recompute": "full", "recompute_every": 2})["activation_checkpointing"]
    assert every["number_checkpoints"] == 2
    staged = config(layout=PIPELINE | {"recompute": "full", "recompute_every": 1})
    assert staged["activation_checkpointing"]["number_checkpoints"] == 2


def test_a_program_of_ones_own_is_told_to_start_the_checkpointing():
    asked = {"layout": {"sharding": "full", "recompute": "full"}, "engine": "deepspeed"}
    theirs = rendered("deepspeed", **asked, model={"decoder": None, "preset": "bert-large"})
    (gap,) = [gap for gap in theirs.gaps if gap.where == "layout.recompute"]
    assert "TRAIN_SCRIPT calls deepspeed.checkpointing.checkpoint" in gap.nearest
    assert not [gap for gap in rendered("deepspeed", **asked).gaps if "recompute" in gap.where]


@pytest.mark.parametrize(
    ("sharding", "hidden", "elements"),
    [("zero1", 256, 25_000_000), ("zero2", 8192, 67_108_864), ("full", 256, 25_000_000)],
)
def test_a_bucket_is_a_matrix_and_never_so_small_that_latency_counts(sharding, hidden, elements):
    model = {"decoder": {"layers": 2, "hidden": hidden, "heads": 8}}
    layout = {"sharding": sharding, "pipeline": 1, "tensor": 1}
    zero = config(model=model, layout=layout)["zero_optimization"]
    assert zero["reduce_bucket_size"] == elements
    other = "stage3_prefetch_bucket_size" if sharding == "full" else "allgather_bucket_size"
    assert zero[other] >= 0.9 * elements


def test_offloaded_parameters_are_a_section_of_their_own():
    layout = {"sharding": "full", "offload": "cpu", "offload_parameters": True}
    zero = config(engine="deepspeed", layout=layout)["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"]
    layout |= {"offload": "nvme", "offload_path": "/local_nvme"}
    zero = config(engine="deepspeed", layout=layout)["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] == 10**8
    layout |= {"offload": "cpu", "offload_parameters": False}
    assert "offload_param" not in config(engine="deepspeed", layout=layout)["zero_optimization"]


def test_a_schedule_that_its_schedulers_miss_is_said():
    gaps = rendered("deepspeed", layout={"sharding": "full"}, train={"warmup_steps": 10}).gaps
    assert "the cosine schedule after 10 steps of warm-up in ds_config.json" in [
        gap.what for gap in gaps
    ]
    constant = rendered("deepspeed", layout={"sharding": "full"}, train={"schedule": "constant"})
    assert not [gap for gap in constant.gaps if "schedule" in gap.what]


@pytest.mark.parametrize(
    ("changes", "part", "fix"),
    [
        (
            {"layout": {"sharding": "hybrid", "shard": 8}},
            "hybrid sharding",
            "layout.sharding: full",
        ),
        (
            {"layout": {"pipeline": 2, "sharding": "full"}},
            "full with pipeline 2",
            "layout.sharding: zero1",
        ),
        (
            {"layout": {"pipeline": 2, "sharding": "zero1", "offload": "cpu"}},
            "offload cpu with pipeline 2",
            "layout.offload: none, or layout.pipeline: 1",
        ),
        ({"layout": {"tensor": 2}}, "tensor 2", "layout.tensor: 1"),
        ({"train": {"optimizer": "muon"}}, "the optimizer muon", "train.optimizer: adamw"),
    ],
)
def test_what_deepspeed_cannot_say_is_refused_with_the_nearest_it_can(changes, part, fix):
    with pytest.raises(RenderError, match=part) as refused:
        rendered("deepspeed", **changes)
    assert fix in [problem.fix for problem in refused.value.problems]


@settings(max_examples=25, deadline=None)
@given(
    sharding=st.sampled_from(["none", "zero1", "zero2", "full"]),
    micro=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([128, 256, 512]),
)
def test_the_three_numbers_of_the_batch_agree_with_the_ranks(sharding, micro, nodes, batch):
    values = config(
        cluster={"nodes": nodes},
        train={"global_batch": batch},
        layout={"sharding": sharding, "micro_batch": micro, "pipeline": 1, "tensor": 1},
    )
    product = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
    assert values["train_batch_size"] == batch == product * 8 * nodes


def test_sgd_is_the_programs_too_and_zero_is_told_to_take_it():
    found = rendered("deepspeed", layout={"sharding": "zero1"}, train={"optimizer": "sgd"})
    values = json.loads(found.files["ds_config.json"])
    assert values["optimizer"] == {"type": "SGD", "params": {"lr": 3e-4, "momentum": 0.9}}
    assert values["zero_allow_untested_optimizer"] is True
    assert not [gap for gap in found.gaps if "optimizer" in gap.what]


PIPELINE = {"pipeline": 2, "tensor": 1, "sharding": "zero1", "schedule": "1f1b"}


def test_a_pipeline_with_zero1(check_golden):
    check_golden("deepspeed/pipeline-zero1", rendered("deepspeed", layout=PIPELINE))


def test_a_pipeline_divides_the_batch_over_its_data_ranks_alone():
    values = config(layout=PIPELINE)
    assert values["pipeline"]["stages"] == 2
    product = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
    assert product * 8 == 64 == values["train_batch_size"]
    assert "pipeline" not in config(layout={"pipeline": 1})


def test_a_pipeline_has_a_program_of_layers():
    files = rendered("deepspeed", layout=PIPELINE).files
    assert "PipelineModule" in files["train.py"]
    assert "train_deepspeed.py" in files


@pytest.mark.parametrize(
    ("layout", "precision", "said"),
    [
        ({}, "bf16", []),
        ({"sharding": "none"}, "fp32", ["whole optimizer state on every data rank"]),
        ({"sharding": "none"}, "bf16", ["whole optimizer state on every data rank"]),
        ({"schedule": "gpipe"}, "bf16", ["the pipeline's schedule gpipe"]),
        (
            {"recompute": "full", "recompute_every": 2},
            "bf16",
            ["one block in 2 recomputed"],
        ),
    ],
)
def test_what_a_pipeline_does_otherwise_is_said(layout, precision, said):
    found = rendered("deepspeed", layout=PIPELINE | layout, train={"precision": precision})
    gaps = [gap.what for gap in found.gaps if gap.where.startswith("layout.")]
    assert gaps == said
    stage = json.loads(found.files["ds_config.json"])["zero_optimization"]["stage"]
    assert stage == 1  # without it, the norm that gradients are clipped by is one stage's


def test_accelerate_starts_no_pipeline_of_deepspeeds():
    with pytest.raises(RenderError, match="pipeline 2"):
        rendered("accelerate", layout={"pipeline": 2, "sharding": "zero1"})
