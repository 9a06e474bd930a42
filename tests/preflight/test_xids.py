"""Kernel logs -> one verdict for each GPU; lines are the catalog's examples, sources there."""

import re

import pytest
from tests.preflight.machines import H100

from paceline.catalog.failure import Effect, load_failures
from paceline.check.preflight.accelerators import gpu_states
from paceline.check.preflight.xids import _ACTS, judge_xids

XIDS = {name: failure for name, failure in load_failures().items() if name.startswith("xid-")}
GPUS = gpu_states(H100)
ACT = {
    "xid-13-sm-exception": "restart the job",
    "xid-31-mmu-fault": "restart the job",
    "xid-48-double-bit-ecc": "reset the GPU",
    "xid-64-row-remap-failure": "drain the node",
    "xid-74-nvlink": "drain the node",
    "xid-79-fallen-off-bus": "reboot the node",
    "xid-119-gsp-timeout": "reset the GPU",
}


def test_every_xid_of_the_catalog_has_something_to_do():
    assert set(_ACTS) == set(XIDS)


@pytest.mark.parametrize("name", XIDS)
def test_an_example_line_of_an_xid_is_its_verdict(name):
    for line in XIDS[name].shows:
        if not re.search(r"NVRM: Xid", line):
            continue
        (verdict,) = judge_xids(line)
        assert verdict.id == name, line
        assert verdict.line == line.strip()


@pytest.mark.parametrize(("name", "act"), ACT.items())
def test_what_to_do_with_the_node(name, act):
    line = next(line for line in XIDS[name].shows if "NVRM: Xid" in line)
    assert judge_xids(line)[0].act == act


@pytest.mark.parametrize(
    "secondary", [name for name, one in XIDS.items() if one.effect is Effect.SECONDARY]
)
@pytest.mark.parametrize(
    "cause", [name for name, one in XIDS.items() if one.effect is not Effect.SECONDARY]
)
def test_a_consequence_is_never_the_verdict_beside_a_cause(secondary, cause):
    bus = "0000:1b:00"
    number = re.search(r"\d+", cause)[0]
    after = re.search(r"\d+", secondary)[0]
    lines = [f"NVRM: Xid (PCI:{bus}): {each}, pid=7, x" for each in (number, after, after)]
    for order in (lines, lines[::-1]):
        (verdict,) = judge_xids("\n".join(order))
        assert verdict.id == cause


def test_a_gpu_that_fell_off_without_a_number_is_found():
    (verdict,) = judge_xids("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.")
    assert (verdict.id, verdict.bus) == ("xid-79-fallen-off-bus", "0000:1b:00.0")


def test_a_memory_error_of_a_gpu_that_was_reset_since_is_over():
    line = "NVRM: Xid (PCI:0000:1b:00): 48, pid=1, name=python, DBE"
    assert judge_xids(line, GPUS)[0].is_over
    assert not judge_xids(line)[0].is_over
    assert not judge_xids(line, GPUS[1:])[0].is_over  # it is not listed any more


def test_the_worst_gpu_comes_first():
    log = (
        "NVRM: Xid (PCI:0000:1b:00): 13, pid=1, Graphics SM\n"
        "NVRM: Xid (PCI:0000:43:00): 74, pid=2, NVLink"
    )
    assert [each.bus for each in judge_xids(log)] == ["0000:43:00.0", "0000:1b:00.0"]


def test_lines_of_other_parts_of_the_kernel_are_no_xids():
    assert judge_xids("usb 1-1: new device\nmlx5_core 0000:1b:00.0: Port module event") == []
