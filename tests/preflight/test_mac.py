"""Macs as nodes of a job of MLX, from what their tools print; and the eight layers of a verdict."""

from dataclasses import replace

import pytest
from tests.preflight.machines import H100, MAC, NOTE, ON_8_H100, answers, text

from paceline.check.preflight.layers import LAYERS, layers_of
from paceline.check.preflight.need import Need
from paceline.check.preflight.preflight import check_names, judge
from paceline.check.preflight.result import Status
from paceline.topology.node.facts import MacTexts, NodeFacts

STUDIO = replace(
    MAC,
    boot_id="",
    packages=MAC.packages | {"mlx": "0.32.4"},
    mac=MacTexts(
        profile=text("mac-studio-m3-ultra.json"),
        macos="26.3",
        ibv_devices=text("ibv_devices-mac.txt"),
    ),
)
ON_MACS = Need(
    num_nodes=1,
    ranks_per_node=1,
    backend="mlx",
    accelerator="M3-Ultra",
    wants_rdma=True,
    rank_bytes=300 * 2**30,
    has_agents=False,
)


def not_right(node: NodeFacts, need: Need = ON_MACS) -> dict[str, tuple[Status, str]]:
    found = judge(answers(node), need, note=NOTE).results
    wrong = (Status.FAIL, Status.WARNING)
    return {each.name: (each.status, each.fix) for each in found if each.status in wrong}


def with_texts(**texts: object) -> NodeFacts:
    return replace(STUDIO, mac=replace(STUDIO.mac, **texts))


def test_s4_10_a_mac_as_the_plan_has_it_passes():
    assert not_right(STUDIO) == {}


@pytest.mark.parametrize(
    ("node", "need", "name", "fix"),
    [
        (
            STUDIO,
            replace(ON_MACS, rank_bytes=400 * 2**30),
            "accelerator-memory",
            "sudo sysctl iogpu.wired_limit_mb=409600",
        ),
        (
            STUDIO,
            replace(ON_MACS, rank_bytes=600 * 2**30),
            "accelerator-memory",
            "set cluster.memory to this Mac's",
        ),
        (with_texts(wired_limit_bytes=2**37), ON_MACS, "accelerator-memory", "sudo sysctl"),
        (with_texts(macos="15.5"), ON_MACS, "rdma", "update to macOS 26.2"),
        (with_texts(ibv_devices=""), ON_MACS, "rdma", "run `rdma_ctl enable`"),
        (STUDIO, replace(ON_MACS, accelerator="M2-Ultra"), "accelerators", "set cluster.accel"),
        (replace(STUDIO, packages=MAC.packages), ON_MACS, "packages", "python3 -m pip install mlx"),
    ],
)
def test_s4_10_what_a_mac_lacks_fails_with_its_fix(node, need, name, fix):
    found = not_right(node, need)
    assert set(found) == {name}
    status, said = found[name]
    assert status is Status.FAIL
    assert said.startswith(fix)


def test_s4_10_a_mac_over_tcp_needs_no_rdma():
    assert not_right(with_texts(macos="15.5"), replace(ON_MACS, wants_rdma=False)) == {}


def test_s4_11_macs_with_another_macos_or_mlx_than_most_are_named():
    older = replace(with_texts(macos="26.2"), packages=STUDIO.packages | {"mlx": "0.31.0"})
    need = replace(ON_MACS, num_nodes=3)
    found = judge(answers(STUDIO, STUDIO, older), need, note=NOTE).results
    said = [(each.name, each.evidence) for each in found if each.status is not Status.PASS]
    assert ("driver", "macOS 26.2, most nodes macOS 26.3") in said
    assert ("packages", "mlx 0.31.0, most nodes 0.32.4") in said


def test_s4_10_every_check_is_in_one_of_the_eight_layers():
    named = [name for layer in LAYERS.values() for name in layer.checks]
    assert len(LAYERS) == 8
    assert sorted(named) == sorted(check_names())


def test_s4_10_a_layer_has_its_worst_result_and_the_fix():
    shut = replace(H100, limits=H100.limits | {"memlock": (65536, 65536)})
    need = replace(ON_8_H100, num_nodes=2)
    found = layers_of(judge(answers(H100, shut), need, note=NOTE).results)
    by_name = {each["name"]: each for each in found}
    assert by_name["Hardware Layer"]["status"] == "pass"
    assert by_name["Health Check"]["status"] == "fail"
    assert "memlock" in by_name["Health Check"]["fix"]
    assert by_name["Health Check"]["fix_command"] == "paceline doctor --fix"
    assert by_name["Hardware Layer"]["fix_command"] is None
    assert by_name["Performance Layer"]["status"] == "warning"  # nothing was measured
    assert by_name["Performance Layer"]["fix_command"]
