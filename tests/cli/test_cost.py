"""`paceline cost`."""

import json
import re

import pytest
from click.testing import CliRunner

from paceline.cli.cost import command

SIZE = ("--params", "7B", "--tokens", "1T", "--accelerator", "H100-SXM", "--ranks", "64")


def run(*words: str):
    return CliRunner().invoke(command, words)


def test_a_size_without_a_job_is_priced():
    done = run(*SIZE, "--mfu", "0.4", "--json")
    assert done.exit_code == 0, done.output
    bill = json.loads(done.output)
    assert bill["num_accelerators"] == 64
    assert bill["costs"][0]["runs_as_planned"]
    assert all(cost["as_of"] and cost["instance"] for cost in bill["costs"])


def test_many_hours_are_written_in_full():
    shown = run("--params", "7B", "--tokens", "10T", *SIZE[4:]).output
    assert "e+03" not in shown
    assert re.search(r"on demand +[\d,]+ +4,6\d\d ", shown), shown


def test_one_provider_can_be_asked_for():
    bill = json.loads(run(*SIZE, "--provider", "aws", "--json").output)
    assert {cost["provider"] for cost in bill["costs"]} == {"aws"}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (SIZE[2:], "name a JOB, or give --params"),
        ((*SIZE, "--mfu", "0.4", "--tokens-per-s", "1M"), "not both"),
        ((*SIZE, "--provider", "nobody"), "no price of H100-SXM at nobody is known"),
        (("--latency", "1s", "--accelerator", "L4"), "serving needs --requests-per-day too"),
        (("--accelerator", "L4", "--requests-per-day", "9"), "serving needs --latency too"),
        (("job.yaml", "--mfu", "0.4"), "--mfu is for a run without JOB"),
        (("job.yaml", "--recompute", "full"), "--recompute is for a run without JOB"),
        ((*SIZE, "--set", "train.steps=3"), "--set is for a JOB"),
        ((*SIZE, "--concurrency", "3"), "--concurrency is for a JOB"),
        (("--latency", "1s", "--store", "1TB"), "--store is not for --requests-per-day"),
        ((*SIZE, "--tokens-per-s", "1000M"), "more than 64 x H100-SXM can compute"),
        ((*SIZE[:-1], "1"), "take 2 or more"),
    ],
)
def test_what_is_missing_or_clashes_is_named(words, what):
    done = run(*words)
    assert done.exit_code == 2
    assert what in done.output


def test_s0_14_serving_names_the_break_even():
    done = run("--accelerator", "L4", "--requests-per-day", "10000", "--latency", "500ms")
    assert done.exit_code == 0, done.output
    assert "break-even" in done.output
    assert "one machine " in done.output
    assert "100,000 requests a day" in done.output


def test_the_break_even_does_not_contradict_the_table_above_it():
    """At 200,000 requests two machines are needed, and the table has billing by request first."""
    words = ("--accelerator", "T4", "--latency", "2s", "--concurrency", "4")
    done = run(*words, "--requests-per-day", "200000")
    table = done.output.split("BILLED")[1]
    assert table.index("by request") < table.index("always, 2 x")
    text = " ".join(done.output.split())
    assert "up to the 172,800 that one machine answers" in text
    shown = json.loads(run(*words, "--requests-per-day", "200000", "--json").output)
    one = shown["break_even"]["requests_per_day"]
    assert f"2 cost less from {2 * one:,.0f} on, up to 345,600" in text
    assert one < 172_800 < 200_000 < 2 * one


def test_serving_on_a_card_without_a_price_says_so():
    done = run("--accelerator", "TPU7x", "--requests-per-day", "10", "--latency", "1s")
    assert done.exit_code == 0, done.output
    assert "the catalog has no price of 1 x TPU7x" in done.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--tokens-per-s", "0.2"), "0.2 comes to 0; write more than that"),
        (("--ranks", "99999999999"), "is not in the range"),
        (("--mfu", "nan"), "--mfu"),
        (("--params", "inf"), "--params"),
    ],
)
def test_a_number_that_no_run_has_is_refused(words, what):
    size = ("--params", "7B", "--tokens", "1T", "--accelerator", "H100", "--ranks", "64")
    result = run(*size, *words)
    assert result.exit_code == 2
    assert what in result.output
