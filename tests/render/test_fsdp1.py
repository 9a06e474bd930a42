"""`engine: fsdp1` is Accelerate's FSDP of version 1."""

import pytest
import yaml
from tests.render.plans import rendered

from paceline.errors import PlanError


def config(**changes):
    return yaml.safe_load(
        rendered("accelerate", engine="fsdp1", **changes).files["accelerate.yaml"]
    )


@pytest.mark.parametrize(
    ("sharding", "strategy"),
    [("full", "FULL_SHARD"), ("zero2", "SHARD_GRAD_OP"), ("hybrid", "HYBRID_SHARD")],
)
def test_s0_7_sharding_is_a_strategy_of_version_1(sharding, strategy):
    values = config(layout={"sharding": sharding})
    assert values["fsdp_config"]["fsdp_version"] == 1
    assert values["fsdp_config"]["fsdp_sharding_strategy"] == strategy
    assert "fsdp_reshard_after_forward" not in values["fsdp_config"]
    assert "parallelism_config" not in values


def test_without_sharding_it_is_ddp():
    assert config(layout={"sharding": "none"})["distributed_type"] == "MULTI_GPU"


def test_parameters_are_offloaded_and_blocks_recomputed():
    values = config(layout={"sharding": "full", "offload": "cpu", "recompute": "full"})
    assert values["fsdp_config"]["fsdp_offload_params"] is True
    assert values["fsdp_config"]["fsdp_activation_checkpointing"] is True


def test_zero1_is_refused_by_name():
    with pytest.raises(PlanError, match="does not write for fsdp1"):
        config(layout={"sharding": "zero1"})
