"""What a bench says about made facts."""

import pytest
from tests.bench.made import measured, plan_of

from paceline.check.bench import estimated_gain, judge_bench
from paceline.report.bench_page import render_bench_page
from paceline.report.bench_text import bench_lines


def verdict_of(tmp_path, second_s: float, *, cores: float = 8.0, **facts):
    first = measured(plan_of(tmp_path, 1, cores=2 * cores), 1.0)
    second = measured(plan_of(tmp_path, 2, cores=cores), second_s, **facts)
    return judge_bench([first, second], "strong")


def test_efficiency_is_speed_up_over_how_many_times_the_ranks(tmp_path):
    first, second = verdict_of(tmp_path, 0.625).rows
    assert (first.efficiency, second.speedup, second.efficiency) == (1.0, 1.6, 0.8)
    assert second.tokens_per_s == pytest.approx(8 * 64 / 0.625)


def test_weak_scaling_is_perfect_when_a_larger_batch_takes_as_long(tmp_path):
    first = measured(plan_of(tmp_path, 1), 1.0)
    second = measured(plan_of(tmp_path, 2, accumulation=8), 1.0)
    assert judge_bench([first, second], "weak").rows[1].efficiency == 1.0


def test_the_slowest_rank_sets_a_step(tmp_path):
    plan = plan_of(tmp_path, 2)
    quick, slow = measured(plan, 1.0).ranks[0], measured(plan, 2.0).ranks[1]
    mixed = measured(plan, 1.0)
    object.__setattr__(mixed, "ranks", (quick, slow))
    assert judge_bench([mixed], "strong").rows[0].step_s == 2.0


def test_more_ranks_than_cores_comes_first_and_says_so(tmp_path):
    verdict = verdict_of(tmp_path, 1.25, cores=0.5, exposed=0.5)
    assert verdict.limits == "cores"
    assert verdict.best_ranks == 1
    first = verdict.advice[0]
    assert "2 ranks share 1 core: they take turns" in first.what
    assert (first.gain, first.how) == (pytest.approx(0.25), "measured")
    assert verdict.sentence.endswith("; 1 rank is the fastest")


def test_exposed_communication_is_a_bound_beside_a_priced_change(tmp_path):
    verdict = verdict_of(tmp_path, 0.8, exposed=0.4)
    assert verdict.limits == "communication"
    told = [each for each in verdict.advice if each.limit == "communication"]
    (bound,) = [each for each in told if each.how == "bound"]
    assert bound.gain == pytest.approx(0.4 / 0.6)
    assert "train.global_batch=16" in " ".join(each.change for each in told)
    row = verdict.rows[1]
    assert row.hidden_s == pytest.approx(0.5 * row.exposed_s)
    assert row.profiler_stretch == pytest.approx(0.1)


def test_slow_data_is_named_with_what_it_would_give_back(tmp_path):
    verdict = verdict_of(tmp_path, 0.8, shares={"data": 0.5})
    assert verdict.limits == "data"
    assert verdict.advice[0].gain == pytest.approx(1.0)


def test_full_memory_is_told_with_the_leaner_layout(tmp_path):
    full = plan_of(tmp_path, 2).cluster.usable_bytes
    verdict = verdict_of(tmp_path, 0.5, peak_bytes=full)
    (advice,) = [each for each in verdict.advice if each.limit == "memory"]
    assert advice.change == "layout.recompute=full"


def test_recomputing_with_room_to_spare_is_priced_by_the_planner(tmp_path):
    again = measured(plan_of(tmp_path, 2, recompute="full"), 0.5)
    verdict = judge_bench([again], "strong")
    (advice,) = [each for each in verdict.advice if each.limit == "memory"]
    assert advice.how == "estimated"
    assert 0 < advice.gain < 0.5


def test_what_computes_all_the_time_is_limited_by_computing(tmp_path):
    verdict = verdict_of(tmp_path, 0.51)
    assert verdict.limits == "compute"
    assert verdict.sentence.startswith("scales well: 2 ranks are 1.96 times as fast as 1 (98%)")


def test_steps_that_vary_much_are_a_caution(tmp_path):
    verdict = verdict_of(tmp_path, 0.5, steps=(0.4, 0.5, 0.5, 0.6, 1.2))
    assert verdict.caution is not None
    assert "vary up to 3.0 times" in verdict.caution
    assert verdict_of(tmp_path, 0.5).caution is None


def test_a_layout_of_unknown_cost_has_no_gain(tmp_path):
    plan = plan_of(tmp_path, 2)
    assert estimated_gain(plan, plan.layout) == 0.0


def test_communication_that_was_not_looked_at_stays_unknown(tmp_path):
    verdict = verdict_of(tmp_path, 0.5, exposed=None)
    assert verdict.rows[1].exposed_s is None
    assert any(line.split()[-3:] == ["|", "?", "?"] for line in bench_lines(verdict))


def test_text_and_page_show_every_number_of_ranks_and_every_advice(tmp_path):
    verdict = verdict_of(tmp_path, 0.8, exposed=0.4)
    text = "\n".join(bench_lines(verdict))
    page = render_bench_page("made", verdict, machine="a machine")
    for shown in (text, page):
        assert "DDP over 2 ranks" in shown
        assert "62%" in shown  # 1 / 0.8 / 2
        assert "hide all of it" in shown
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org", "")
