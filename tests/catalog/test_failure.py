"""The catalog of failures: one text for each, and patterns that find their own examples."""

import re

import pytest

from paceline.catalog.failure import Effect, failures_named, load_benign_lines, load_failures

FAILURES = load_failures()
PUBLISHED = (
    "gradient-sync-deadlock",
    "fsdp-cpu-offload-oom",
    "mixed-precision-loss-scaling",
    "distributed-sampler-shuffle",
    "checkpoint-rank-mismatch",
    "no-distributed-sampler",
    "missing-set-epoch",
    "no-gradient-checkpointing",
    "no-mixed-precision",
    "no-pin-memory",
    "gloo-backend-gpu",
    "dataparallel-not-ddp",
)


@pytest.mark.parametrize(
    "failure", [one for one in FAILURES.values() if one.log and one.shows], ids=lambda one: one.id
)
def test_an_example_of_a_failure_is_found_by_one_of_its_patterns(failure):
    patterns = (*failure.log, *failure.weak_log)
    assert any(re.search(pattern, line) for pattern in patterns for line in failure.shows)


@pytest.mark.parametrize("line", load_benign_lines(), ids=lambda line: line.id)
def test_an_example_of_a_harmless_line_is_found_by_its_pattern(line):
    assert all(any(re.search(one, text) for one in line.log) for text in line.shows)


@pytest.mark.parametrize("name", PUBLISHED)
def test_s3_9_every_published_edge_and_validation_has_a_failure(name):
    assert failures_named(name)


def test_every_failure_says_why_what_to_change_and_where_that_is_known_from():
    for failure in FAILURES.values():
        assert failure.why, failure.id
        assert failure.fix, failure.id
        assert failure.sources, failure.id


def test_consequences_are_told_apart_from_causes():
    assert FAILURES["collective-watchdog-timeout"].effect is Effect.SECONDARY
    assert FAILURES["port-in-use"].effect is Effect.FATAL
