"""What people read of a verdict."""

from dataclasses import replace

import pytest
from tests.preflight.machines import CONTAINER, H100, NOTE, ON_8_H100, answers

from paceline.check.preflight.names import fold_names
from paceline.check.preflight.preflight import judge
from paceline.report.preflight_text import format_preflight
from paceline.topology.node.facts import Disk

SMALL = replace(H100, shm=Disk(total_bytes=2**26, free_bytes=2**26))


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["node01", "node02", "node03"], "node[01-03]"),
        (["node9", "node10", "node11"], "node9,node[10-11]"),
        (["a1", "b1", "a2", "a4"], "a[1-2,4],b1"),
        (["n03", "n01", "n02"], "n[01-03]"),
        (["rack1-n1.site.org", "rack1-n2.site.org"], "rack1-n[1-2].site.org"),
        (["me@node01", "me@node02"], "node[01-02]"),
        (["10.0.0.4", "10.0.0.5"], "10.0.0.4,10.0.0.5"),
        (["login", "node1"], "login,node1"),
        ([], ""),
    ],
)
def test_names_are_folded_as_slurm_reads_them(names, folded):
    assert fold_names(names) == folded


def test_nodes_that_fail_alike_are_named_together_and_those_that_pass_are_listed():
    verdict = judge(answers(H100, SMALL, SMALL, H100), ON_8_H100, note=NOTE)
    shown = "\n".join(format_preflight(verdict))
    assert "FAIL shared-memory on node[02-03]  [shm-too-small]" in shown
    assert shown.endswith("pass  node[01,04]\nfail  node[02-03]")
    assert shown.count("/dev/shm has 64 MiB") == 1


def test_a_hundred_nodes_that_pass_are_one_row_and_the_bad_one_has_its_own():
    verdict = judge(answers(*[H100] * 99, SMALL), ON_8_H100, note=NOTE)
    table = "\n".join(format_preflight(verdict)).partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == ["node", "node100", "node[01-99]"]


def test_what_could_not_be_looked_at_is_said_with_the_reason():
    verdict = judge(answers(replace(H100, kernel_log=None)), ON_8_H100, note=NOTE)
    shown = "\n".join(format_preflight(verdict))
    assert "kernel-log: this user may not read dmesg" in shown
    assert "kernel-log" not in "\n".join(
        line for line in format_preflight(judge(answers(H100), ON_8_H100, note=NOTE))
    )


def test_everything_is_shown_when_asked():
    shown = "\n".join(format_preflight(judge(answers(CONTAINER), ON_8_H100), shows_all=True))
    assert "pass     host-memory" in shown
    assert "fail     accelerators" in shown
