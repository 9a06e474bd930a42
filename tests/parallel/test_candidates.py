"""Which layouts are possible, and what clashes."""

from pathlib import Path

from paceline.errors import Problem
from paceline.parallel import Layout, candidates, check_layout_choices
from paceline.spec import LayoutSpec, parse_job

JOB = """\
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {path: x}
train: {global_batch: 64, steps: 100}
"""


def problems(num_ranks: int, *overrides: str) -> list[Problem]:
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
    return list(check_layout_choices(job, num_ranks))


def test_every_candidate_computes_the_whole_batch():
    layouts = candidates(48, 4, LayoutSpec())
    assert all(layout.global_batch == 48 for layout in layouts)
    assert {layout.micro_batch for layout in layouts} == {12, 6, 4, 3, 2, 1}
    assert len(layouts) == len(set(layouts)) == 6 + 6 + 5


def test_one_rank_is_not_sharded():
    assert {layout.sharding for layout in candidates(8, 1, LayoutSpec())} == {"none"}


def test_what_the_job_fixed_stays_fixed():
    (layout,) = candidates(16, 2, LayoutSpec(sharding="none", micro_batch=4))
    assert layout == Layout(data=2, sharding="none", micro_batch=4, accumulation=2)


def test_reducing_each_time_is_only_tried_where_it_differs():
    for layout in candidates(16, 2, LayoutSpec()):
        if layout.reduce_every_micro_batch:
            assert layout.sharding == "full"
            assert layout.accumulation > 1


def test_a_batch_that_does_not_divide_has_no_candidates():
    assert candidates(7, 2, LayoutSpec()) == []


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    (problem,) = problems(6)
    assert problem.code == "L001"
    assert "64 does not divide over 6 ranks" in problem.what
    assert problem.fix == "set train.global_batch to 60 or 66, or cluster.per_node to 4"


def test_a_batch_smaller_than_the_ranks_names_only_the_larger():
    (problem,) = problems(100)
    assert problem.fix.startswith("set train.global_batch to 100, or cluster.per_node to 64")


def test_a_micro_batch_that_does_not_divide_names_the_nearest():
    (problem,) = problems(8, "layout.micro_batch=3")
    assert problem.code == "L002"
    assert "3 does not divide the 8 samples of a rank" in problem.what
    assert problem.fix == "set layout.micro_batch to 2 or 4, or train.global_batch to 48 or 72"


def test_choices_that_go_together_are_no_problem():
    assert problems(8, "layout.micro_batch=4") == []
