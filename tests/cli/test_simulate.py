"""`paceline simulate` as a person calls it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline.cli.simulate import command
from paceline.errors import JobError
from paceline.job import load_job
from paceline.plan import plan_job

ROOT = Path(__file__).parent.parent.parent
LARGE = str(ROOT / "examples/plan-70b/job.yaml")
TINY = str(ROOT / "examples/tiny-lm/job.yaml")
FAST = ("--days", "3", "--seeds", "2", "--rates", "1,4")


def called(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_s4_16_every_size_and_system_is_shown_with_what_it_rests_on():
    shown = called(LARGE, "--nodes", "64,128", "--compare", *FAST).stdout
    for word in (
        "64 nodes",
        "128 nodes",
        "4 x as often",
        "paceline, slow rendezvous",
        "checkpoint restart",
        "21 s (TrainMover)",
        "measured: Paceline's recovery benchmark",
        "assumed: ",
        "(published: ",
        "published: 419 unexpected interruptions",
    ):
        assert word in shown
    assert re.match(r"lost        \d+\.\d\d% of 3 days on 64 nodes, \d+", shown)


def test_json_has_what_was_asked_the_cases_and_shares_that_sum_to_one():
    found = json.loads(
        called(LARGE, "--nodes", "64", "--compare", "trainmover", "--json", *FAST).stdout
    )
    assert found["question"]["failures"]["name"] == "llama3"
    (case,) = found["cases"]
    assert case["num_nodes"] == 64
    assert len(found["results"]) == 2 * 3
    for result in found["results"]:
        assert result["known"] == "simulated"
        assert sum(result["shares"].values()) == pytest.approx(1)
        assert result["useful_low"] <= result["useful"] <= result["useful_high"]


def test_the_batch_grows_with_the_nodes():
    found = json.loads(called(LARGE, "--nodes", "16,32", "--json", *FAST).stdout)
    assert [case["global_batch"] for case in found["cases"]] == [256, 512]


def test_checkpoints_are_as_far_apart_as_in_the_plan():
    """Before, Daly's interval for one tier's failures was taken, whatever the run would do."""
    found = json.loads(called(LARGE, "--nodes", "8", "--json", *FAST).stdout)
    planned = plan_job(load_job(Path(LARGE)))
    assert found["cases"][0]["save_every"] == planned.checkpoint_every


def test_a_phase_of_ones_own_takes_the_place_of_the_assumed_one():
    shown = called(LARGE, "--nodes", "64", "--phase", "meet=12", *FAST).stdout
    assert "meet        12 s, for the rendezvous, with new process groups (given: --phase)" in shown
    assert "slow rendezvous" not in shown


def test_a_step_that_was_measured_takes_the_place_of_the_estimate():
    shown = called(LARGE, "--nodes", "64", "--step", "7s", *FAST).stdout
    assert "7 s a step (given)" in shown


def test_phases_that_vary_cost_more_on_the_mean():
    def useful(tail: str) -> float:
        arguments = ("--nodes", "2048", "--phase", "meet=60", "--tail", tail, "--json", *FAST)
        found = json.loads(called(LARGE, *arguments).stdout)
        return found["results"][-1]["useful"]

    assert useful("1.5") < useful("0")


def test_this_machines_job_is_simulated_on_one_node_and_not_on_many():
    assert "1 node " in called(TINY, *FAST).stdout
    with pytest.raises(JobError, match="the job's cluster is this machine"):
        called(TINY, "--nodes", "600")
    assert "H100-SXM" in called(TINY, "--nodes", "2", "--accelerator", "H100-SXM", *FAST).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "many"), "is not a list of numbers"),
        (("--nodes", "0"), "is not a list of numbers"),
        (("--rates", "-1"), "is not a list of numbers"),
        (("--compare", "magic"), "is no system to compare with"),
        (("--phase", "met=3"), "is no phase"),
        (("--step", "soon"), "is not a duration"),
        (("--step", "0s"), "is not above 0"),
        (("--failures", "often"), "S001"),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(arguments, said):
    with pytest.raises(JobError, match=said):
        called(LARGE, *arguments)


def test_s4_16_a_mean_of_recoveries_below_one_is_not_told_as_none():
    from paceline.report.simulate_text import _count

    assert (_count(0.25), _count(3.4), _count(12.3)) == ("0.25", "3.4", "12")
