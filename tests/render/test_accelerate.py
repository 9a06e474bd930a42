import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.render.plans import rendered

from paceline.errors import PlanError
from paceline.render import RenderError

FSDP1_WORDS = (
    "sharding_strategy",
    "use_orig_params",
    "backward_prefetch",
    "forward_prefetch",
    "sync_module_states",
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "LOCAL_STATE_DICT",
)


def config(**changes):
    return yaml.safe_load(rendered("accelerate", **changes).files["accelerate.yaml"])


def test_s0_7_ddp_on_two_nodes(check_golden):
    check_golden("accelerate/ddp-two-nodes", rendered("accelerate", layout={"sharding": "none"}))


def test_s0_7_fsdp2_on_one_node(check_golden):
    found = rendered("accelerate", cluster={"nodes": 1}, layout={"sharding": "full"})
    check_golden("accelerate/fsdp2-one-node", found)


def test_s0_7_zero1_goes_through_deepspeed(check_golden):
    check_golden("accelerate/zero1-two-nodes", rendered("accelerate", layout={"sharding": "zero1"}))


@pytest.mark.parametrize("sharding", ["zero2", "full", "hybrid"])
def test_fsdp2_has_no_words_of_fsdp1(sharding):
    found = rendered("accelerate", layout={"sharding": sharding})
    assert config(layout={"sharding": sharding})["fsdp_config"]["fsdp_version"] == 2
    assert not [word for word in FSDP1_WORDS if word in found.files["accelerate.yaml"]]


def test_units_of_a_model_that_names_none_are_a_gap_and_can_be_named():
    known = rendered("accelerate", layout={"sharding": "full"})
    assert "blocks as units of sharding" not in [gap.what for gap in known.gaps]
    assert (
        '${WRAP_CLASS:+--fsdp_transformer_layer_cls_to_wrap "$WRAP_CLASS"}'
        in (known.files["launch.sh"])
    )
    theirs = rendered(
        "accelerate",
        engine="accelerate",
        layout={"sharding": "full"},
        model={"decoder": None, "preset": "bert-large"},
    )
    (gap,) = [gap for gap in theirs.gaps if gap.what == "blocks as units of sharding"]
    assert "WRAP_CLASS=MyBlock ./launch.sh" in gap.nearest
    whole = rendered("accelerate", layout={"sharding": "none"}).files["launch.sh"]
    assert "WRAP_CLASS" not in whole


def test_zero2_keeps_parameters_gathered_after_the_forward_pass():
    assert config(layout={"sharding": "full"})["fsdp_config"]["fsdp_reshard_after_forward"] is True
    zero2 = config(layout={"sharding": "zero2"})["fsdp_config"]
    assert zero2["fsdp_reshard_after_forward"] is False


def test_hybrid_sharding_is_a_mesh_of_two_axes():
    mesh = config(layout={"sharding": "hybrid", "shard": 8})["parallelism_config"]
    assert mesh["parallelism_config_dp_replicate_size"] == 2
    assert mesh["parallelism_config_dp_shard_size"] == 8


def test_tensor_and_context_are_axes_of_the_mesh():
    found = rendered(
        "accelerate",
        layout={"sharding": "full", "tensor": 2, "context": 2, "context_kind": "ring"},
    )
    mesh = yaml.safe_load(found.files["accelerate.yaml"])["parallelism_config"]
    assert mesh["parallelism_config_tp_size"] == 2
    assert mesh["parallelism_config_cp_size"] == 2
    assert mesh["parallelism_config_dp_shard_size"] == 4
    assert [(gap.what, gap.fix) for gap in found.gaps] == [
        ("tensor 2", "layout.tensor: 1"),
        ("context 2", "layout.context: 1"),
    ]


def test_the_fix_for_context_ranks_gives_a_mesh_of_all_ranks():
    values = config(layout={"sharding": "full", "context": 16, "context_kind": "ring"})
    mesh = values["parallelism_config"]
    assert values["distributed_type"] == "FSDP"
    assert mesh["parallelism_config_cp_size"] == values["num_processes"] == 16
    assert mesh["parallelism_config_dp_shard_size"] == 1


def test_several_nodes_need_no_name_that_nothing_reads():
    assert "RUN_ID" not in rendered("accelerate").files["launch.sh"]


def test_a_node_says_its_own_rank_and_never_the_one_of_the_host_that_submits():
    script = rendered("accelerate", layout={"sharding": "none"}).files["launch.sh"]
    assert '--machine_rank "$NODE_RANK"' in script
    assert 'NODE_RANK="${NODE_RANK:-${SLURM_NODEID:?' in script
    assert "SLURM_PROCID" not in script
    assert "machine_rank" not in rendered("accelerate").files["accelerate.yaml"]


def test_on_cpus_never_the_flag_that_starts_one_process():
    found = rendered(
        "accelerate",
        cluster={"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"},
        train={"precision": "fp32"},
        layout={"sharding": "none"},
    )
    assert "export ACCELERATE_USE_CPU=true" in found.files["launch.sh"]
    assert yaml.safe_load(found.files["accelerate.yaml"])["use_cpu"] is False


def test_deepspeed_on_cpus_is_not_told_to_be_ddp():
    found = rendered(
        "accelerate",
        cluster={"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"},
        train={"precision": "fp32"},
        layout={"sharding": "zero1"},
    )
    assert "export DS_ACCELERATOR=cpu" in found.files["launch.sh"]
    assert "ACCELERATE_USE_CPU" not in found.files["launch.sh"]


def test_fsdp2_on_cpus_would_be_ddp_without_a_word_and_is_refused():
    with pytest.raises(RenderError, match="without one trains with DDP in silence"):
        rendered(
            "accelerate",
            cluster={"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"},
            train={"precision": "fp32"},
            layout={"sharding": "full"},
        )


def test_deepspeeds_numbers_stand_in_one_file_only():
    found = rendered("accelerate", layout={"sharding": "zero1"})
    assert "mixed_precision" not in found.files["accelerate.yaml"]
    assert "zero_stage" not in found.files["accelerate.yaml"]
    values = json.loads(found.files["ds_config.json"])
    assert "optimizer" not in values  # Accelerate takes it from the program, or refuses


@pytest.mark.parametrize(
    ("layout", "part", "fix"),
    [
        ({"pipeline": 2}, "pipeline 2", "layout.pipeline: 1"),
        ({"sharding": "none", "tensor": 2}, "DDP over 8 with tensor 2", "layout.sharding: full"),
        (
            {"sharding": "none", "tensor": 1, "context": 16, "context_kind": "ring"},
            "DDP over 1 with tensor 1 and context 16",
            "layout.sharding: full",
        ),
        (
            {"sharding": "none", "tensor": 4, "context": 4, "context_kind": "ring"},
            "DDP over 1 with tensor 4 and context 4",
            "layout.sharding: full",
        ),
        (
            {"sharding": "full", "context": 2, "context_kind": "ulysses"},
            "Ulysses over 2",
            "layout.context_kind: ring",
        ),
    ],
)
def test_what_accelerate_cannot_say_is_refused_with_the_nearest_it_can(layout, part, fix):
    with pytest.raises(RenderError, match=part) as refused:
        rendered("accelerate", layout=layout)
    assert fix in [problem.fix for problem in refused.value.problems]


def test_nvme_without_a_folder_is_refused():
    with pytest.raises(PlanError, match="no folder is named"):
        rendered("accelerate", engine="deepspeed", layout={"sharding": "full", "offload": "nvme"})


@settings(max_examples=25, deadline=None)
@given(
    sharding=st.sampled_from(["none", "zero1", "zero2", "full", "hybrid"]),
    micro=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2, 4]),
)
def test_ranks_and_meshes_and_batches_agree_in_every_file(sharding, micro, nodes):
    found = rendered(
        "accelerate",
        cluster={"nodes": nodes},
        train={"global_batch": 512},
        layout={"sharding": sharding, "micro_batch": micro, "pipeline": 1},
    )
    values = yaml.safe_load(found.files["accelerate.yaml"])
    batch = json.loads(found.files["train.json"])["batch"]
    assert values["num_processes"] == 8 * nodes
    assert batch["micro"] * batch["accumulation"] * batch["data_ranks"] == 512
    if "parallelism_config" in values:
        mesh = values["parallelism_config"]
        sizes = [size for name, size in mesh.items() if name.endswith("_size")]
        product = 1
        for size in sizes:
            product *= size
        assert product == values["num_processes"]
    if "ds_config.json" in found.files:
        ds = json.loads(found.files["ds_config.json"])
        assert ds["gradient_accumulation_steps"] == batch["accumulation"]
    else:
        steps = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={batch['accumulation']}"
        assert steps in found.files["launch.sh"]


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_selective_recompute_is_the_programs_with_ddp_and_said_with_deepspeed(sharding):
    found = rendered("accelerate", layout={"sharding": sharding, "recompute": "selective"})
    said = [gap.what for gap in found.gaps if gap.where == "layout.recompute"]
    assert said == ([] if sharding == "none" else ["selective recompute"])


def test_full_recompute_through_deepspeed_is_in_its_configuration_and_no_gap():
    layout = {"sharding": "zero1", "recompute": "full", "recompute_every": 2}
    found = rendered("accelerate", layout=layout)
    assert "activation_checkpointing" in json.loads(found.files["ds_config.json"])
    assert json.loads(found.files["train.json"])["layout"]["recompute_every"] == 2
    assert not [gap for gap in found.gaps if "recompute" in gap.where]
