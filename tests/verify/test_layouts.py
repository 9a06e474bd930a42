"""Every kind of layout, on real ranks, is found right; its deviations are rounding."""

import pytest
from tests.verify.scene import case_of, layout_of, line_of, verify_all

from paceline.check.verify.judge import judge
from paceline.record.verification import Facts

pytestmark = pytest.mark.ranks

TWO = {
    "DDP": layout_of(),
    "FSDP2": layout_of(sharding="full", recompute="full"),
    "ZeRO-1": layout_of(sharding="zero1"),
    "tensor": layout_of(data=1, tensor=2),
    "pipeline": layout_of(data=1, pipeline=2, accumulation=4),
    "context": layout_of(data=1, context=2),
}
FOUR = {
    "HSDP": layout_of(data=4, sharding="hybrid", shard=2, micro_batch=1),
    "tensor x FSDP2": layout_of(sharding="full", tensor=2),
    "pipeline x data": layout_of(pipeline=2, accumulation=4, micro_batch=1),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    folder = tmp_path_factory.mktemp("two")
    found = verify_all([(case_of(layout), None) for layout in TWO.values()], folder)
    return dict(zip(TWO, found, strict=True))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    folder = tmp_path_factory.mktemp("four")
    cases = [case_of(layout, only=("float64", "job")) for layout in FOUR.values()]
    found = verify_all([(case, None) for case in cases], folder)
    return dict(zip(FOUR, found, strict=True))


@pytest.mark.parametrize("name", TWO)
def test_s3_11_a_layout_of_two_ranks_is_right_in_every_line(two: dict[str, Facts], name: str):
    verdict = judge(two[name])
    assert [line for line in verdict.lines if line.status == "fail"] == []
    assert verdict.is_right


@pytest.mark.repeat  # `runtime/test_layouts.py` has these layouts, the tests of two ranks `judge`
@pytest.mark.parametrize("name", FOUR)
def test_a_layout_of_four_ranks_is_right_in_every_line(four: dict[str, Facts], name: str):
    verdict = judge(four[name])
    assert [line for line in verdict.lines if line.status == "fail"] == []
    assert verdict.is_right


@pytest.mark.parametrize("name", TWO)
def test_what_is_allowed_is_far_below_any_fault_and_above_what_is_seen(
    two: dict[str, Facts], name: str
):
    for kind in ("loss curve", "outputs of modules", "gradients", "parameters"):
        line = line_of(two[name], f"{kind} in float64")
        assert line.seen is not None
        assert line.allowed is not None
        assert line.seen < line.allowed < 1e-9


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context"])
def test_every_module_is_compared_however_its_output_is_split(two: dict[str, Facts], name: str):
    num_modules = len(two[name].reference.wide[0].modules)
    line = line_of(two[name], "outputs of modules in float64")
    assert line.what.startswith(f"{num_modules} of {num_modules} modules")


def test_copies_of_data_ranks_and_none_of_full_sharding_are_compared(two: dict[str, Facts]):
    assert line_of(two["DDP"], "copies in sync").status == "pass"
    assert line_of(two["FSDP2"], "copies in sync").status == "skip"


def test_a_shard_is_half_of_every_parameter(two: dict[str, Facts]):
    held = two["FSDP2"].ranks[1].runs["job"].held
    whole = two["DDP"].ranks[1].runs["job"].held
    assert held is not None
    assert whole is not None
    assert 2 * held.parameters == whole.parameters
    assert 2 * held.optimizer == whole.optimizer


def test_a_checkpoint_is_the_same_state_in_another_layout(two: dict[str, Facts]):
    for name, other in (("DDP", "FSDP2"), ("tensor", "FSDP2"), ("pipeline", "DDP")):
        assert line_of(two[name], f"load into {other} over 2 ranks").status == "pass"
