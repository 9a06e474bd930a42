"""What a bench says about made facts."""

import re
from dataclasses import replace

import pytest
from tests.bench.made import measured, plan_of
from tests.bench.test_communication import event

from paceline.check.bench import estimated_gain, judge_bench
from paceline.check.bench_setting import judge_settings
from paceline.report.bench_page import render_bench_page
from paceline.report.bench_text import bench_lines, setting_lines
from paceline.runtime.bench.communication import BEGIN, END, communication_in, minus, union


def verdict_of(tmp_path, second_s: float, *, cores: float = 8.0, **facts):
    first = measured(plan_of(tmp_path, 1, cores=2 * cores), 1.0)
    second = measured(plan_of(tmp_path, 2, cores=cores), second_s, **facts)
    return judge_bench([first, second], "strong")


@pytest.mark.parametrize(
    ("exposed", "band"), [(0.05, "below 20 %"), (0.3, "20 to 40 %"), (0.6, "above 40 %")]
)
def test_s4_18_communication_has_its_band(tmp_path, exposed, band):
    verdict = verdict_of(tmp_path, 0.8, exposed=exposed)
    share = verdict.rows[1].exposed_s / verdict.rows[1].step_s
    assert verdict.communication.startswith(f"{share:.0%} of a step, {band}")
    assert verdict.communication in " ".join(" ".join(bench_lines(verdict)).split())


def test_efficiency_is_speed_up_over_how_many_times_the_ranks(tmp_path):
    first, second = verdict_of(tmp_path, 0.625).rows
    assert (first.efficiency, second.speedup, second.efficiency) == (1.0, 1.6, 0.8)
    assert second.tokens_per_s == pytest.approx(8 * 64 / 0.625)


def test_s2_14_weak_scaling_is_perfect_when_a_larger_batch_takes_as_long(tmp_path):
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


def test_s0_10_exposed_communication_is_a_bound_beside_a_priced_change(tmp_path):
    verdict = verdict_of(tmp_path, 0.8, exposed=0.4)
    assert verdict.limits == "communication"
    told = [each for each in verdict.advice if each.limit == "communication"]
    (bound,) = [each for each in told if each.how == "bound"]
    assert bound.gain == pytest.approx(0.4 / 0.6)
    assert "train.global_batch=16" in " ".join(each.change for each in told)
    row = verdict.rows[1]
    assert row.hidden_s == pytest.approx(0.5 * row.exposed_s)
    assert row.profiler_stretch == pytest.approx(0.1)


def test_s0_10_slow_data_is_named_with_what_it_would_give_back(tmp_path):
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
    assert verdict.sentence.startswith("scales well: 2 ranks are 1.96 times as fast as 1 (98%;")


def test_s0_11_steps_that_vary_many_times_over_give_no_verdict_and_no_gains(tmp_path):
    wild = (0.2, 0.4, 0.5, 0.5, 0.6, 1.2)
    verdict = verdict_of(tmp_path, 0.5, steps=wild, exposed=0.4)
    assert verdict.sentence.startswith("no verdict: steps on 2 ranks vary 6.0 times")
    assert (verdict.communication, verdict.limits, verdict.advice) == (None, None, ())


def test_a_speed_up_between_scaling_and_not_scaling_is_no_verdict(tmp_path):
    first = measured(plan_of(tmp_path, 1), 1.0, steps=(0.8, 0.9, 1.0, 1.0, 1.1, 1.2))
    second = measured(plan_of(tmp_path, 2), 0.6, steps=(0.5, 0.6, 0.6, 0.6, 0.7, 0.7))
    verdict = judge_bench([first, second], "strong")
    assert "2 ranks are 1.14 to 2.40 times as fast as 1" in verdict.refused
    five = measured(plan_of(tmp_path, 2), 0.6, steps=(0.6,) * 5)
    assert "set --steps to 6 or more" in judge_bench([first, five], "strong").refused


def test_cores_that_ranks_share_are_named_where_the_times_tell_nothing(tmp_path):
    verdict = verdict_of(tmp_path, 0.5, steps=(0.1, 0.5, 0.5, 0.5, 0.5, 0.9), cores=0.5)
    assert [(each.limit, each.gain) for each in verdict.advice] == [("cores", None)]


def test_steps_that_vary_much_are_a_caution(tmp_path):
    verdict = verdict_of(tmp_path, 0.5, steps=(0.4, 0.5, 0.5, 0.6, 1.2))
    assert verdict.caution is not None
    assert "vary up to 3.0 times" in verdict.caution
    assert "2 ranks" in verdict.caution
    assert verdict_of(tmp_path, 0.5).caution is None


def test_a_layout_of_unknown_cost_has_no_gain(tmp_path):
    plan = plan_of(tmp_path, 2)
    assert estimated_gain(plan, plan.layout) == 0.0


def test_communication_that_was_not_looked_at_stays_unknown(tmp_path):
    verdict = verdict_of(tmp_path, 0.5, exposed=None)
    assert verdict.rows[1].exposed_s is None
    (exposed,) = re.findall("(?m)^communication, exposed .*", "\n".join(bench_lines(verdict)))
    assert exposed.endswith("?")


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


def test_each_thing_seen_is_followed_by_its_own_changes(tmp_path):
    verdict = verdict_of(tmp_path, 1.25, cores=0.5, exposed=0.5)
    text = " ".join(" ".join(bench_lines(verdict)).split())
    seen = list(dict.fromkeys(advice.what for advice in verdict.advice))
    assert len(seen) > 1
    parts = re.split(f" \\d\\. (?=(?:{'|'.join(map(re.escape, seen))}))", text)[1:]
    for what, part in zip(seen, parts, strict=True):
        changes = [advice.change for advice in verdict.advice if advice.what == what]
        assert part.count("-> ") == len(changes)
        assert all(f"-> {change}" in part for change in changes)


def test_a_page_shows_the_memory_that_was_measured_and_a_dash_where_none_was(tmp_path):
    measured, unknown = (
        render_bench_page("made", verdict_of(tmp_path, 0.8, peak_bytes=peak), machine="a machine")
        for peak in (3 * 2**30, None)
    )
    assert ">3 GiB<" in measured
    assert "3 GiB" not in unknown
    assert ">-<" in unknown


def test_s0_11_more_than_as_many_times_as_fast_is_no_verdict(tmp_path):
    verdict = verdict_of(tmp_path, 0.4)
    assert verdict.refused is not None
    assert verdict.sentence.startswith("no verdict: 2 ranks measured 2.50 times as fast")
    assert "scales well" not in verdict.sentence
    assert verdict_of(tmp_path, 0.49).refused is None


def test_a_rank_that_computed_something_twice_may_be_beaten_by_more(tmp_path):
    first = measured(plan_of(tmp_path, 1, recompute="full"), 1.0)
    second = measured(plan_of(tmp_path, 2), 0.4)
    assert judge_bench([first, second], "strong").refused is None


def test_s0_11_a_step_above_the_peak_is_no_verdict(tmp_path):
    plan = plan_of(tmp_path, 1)
    cluster = replace(plan.cluster, accelerator="H100-SXM")
    estimate = replace(plan.estimate, mfu=0.5, step_s=1.0)
    verdict = judge_bench(
        [measured(replace(plan, cluster=cluster, estimate=estimate), 0.4)], "weak"
    )
    assert "125% of the peak of H100-SXM" in verdict.sentence
    assert judge_bench([measured(replace(plan, estimate=estimate), 0.4)], "weak").refused is None


def waits(plan, *waiting, shares=None):
    """Ranks that wait for other stages for these shares of a profiled step."""
    seen = measured(plan, 1.0, exposed=0.5, shares=shares)
    ranks = tuple(
        replace(rank, communication=replace(rank.communication, waiting_s=share * 1.1, vote_s=0))
        for rank, share in zip(seen.ranks, waiting, strict=True)
    )
    return replace(seen, ranks=ranks)


def test_s1_20_a_pipelines_bubble_is_measured_by_stage_beside_the_schedules(tmp_path):
    plan = plan_of(tmp_path, 2, data=1, pipeline=2, accumulation=4)
    verdict = judge_bench([waits(plan, 0.3, 0.4)], "strong")
    (row,) = verdict.rows
    assert row.stages_idle == (pytest.approx(0.3), pytest.approx(0.4))
    assert row.bubble == pytest.approx(0.35)
    assert row.ideal_bubble == pytest.approx(1 / 5)
    (bubble,) = [each for each in verdict.advice if each.limit == "bubble"]
    assert bubble.change == "train.global_batch=8: 8 micro-batches instead of 4"
    assert bubble.gain == pytest.approx((8 / 9) / (4 / 5) - 1)
    text = "\n".join(bench_lines(verdict))
    assert "bubble 35% of a step, measured; 20% by the schedule" in text
    assert "stage 1: waits for communication 50% of a step, 40% for other stages" in text
    assert "500 ms 50%" in text
    assert "waits for communication: 15% of a step (the bubble not included)" in " ".join(
        text.split()
    )
    flat = " ".join(text.split())
    assert "hold a rank up for 150 ms of a step, 15%, waiting for other stages not incl" in flat


def one_f_one_b(p: int, m: int, forward_s: float, backward_s: float):
    """When each stage waits for a message and when it is done, by hand: stage s does p - s - 1
    forwards, then one forward and one backward at a time; a message takes no time."""
    orders = []
    for stage in range(p):
        early = min(p - stage - 1, m)
        pairs = [pair for i in range(m - early) for pair in (("F", early + i), ("B", i))]
        rest = [("B", i) for i in range(m - early, m)]
        orders.append([*(("F", i) for i in range(early)), *pairs, *rest])
    done, waits = {}, [[] for _ in range(p)]
    clock, at = [0.0] * p, [0] * p
    while any(at[stage] < 2 * m for stage in range(p)):
        for stage in range(p):
            while at[stage] < 2 * m:
                kind, number = orders[stage][at[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < p:
                    if (kind, source, number) not in done:
                        break
                    waits[stage].append((clock[stage], done[kind, source, number]))
                    clock[stage] = max(clock[stage], done[kind, source, number])
                clock[stage] += forward_s if kind == "F" else backward_s
                done[kind, stage, number] = clock[stage]
                at[stage] += 1
    return waits, clock


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (2, 8), (4, 4), (4, 8), (4, 16)])
def test_the_bubble_of_known_stage_times_is_the_hand_account_of_1f1b(tmp_path, p, m):
    waits, ends = one_f_one_b(p, m, 1.0, 2.0)
    step_s, ranks = max(ends), []
    assert step_s == 3 * (m + p - 1)
    plan = plan_of(tmp_path, p, data=1, pipeline=p, accumulation=m, schedule="1f1b")
    seen = measured(plan, step_s)
    for rank, (waited, end) in zip(seen.ranks, zip(waits, ends, strict=True), strict=True):
        received = [(start, max(start, until)) for start, until in waited]
        idle = [*received, (end, step_s)]
        busy = minus([(0, step_s)], union(span for span in idle if span[0] < span[1]))
        found = communication_in(
            [
                event(BEGIN, 0, 0),
                event(END, step_s, step_s),
                event("gloo:send", 1, 1),
                event("gloo:all_reduce", end, step_s),
                *(event("gloo:recv", *span) for span in received),
                *(event("aten::mm", *span) for span in busy),
            ],
            1,
        )
        ranks.append(replace(rank, communication=replace(found, vote_s=step_s - end)))
    (row,) = judge_bench([replace(seen, ranks=tuple(ranks))], "strong").rows
    assert row.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert row.bubble == pytest.approx(row.ideal_bubble)
    assert row.stages_idle == pytest.approx(row.stages_held_up)
    assert row.exposed_s == pytest.approx(row.bubble * row.step_s)


def test_a_pipeline_of_one_data_rank_reduces_no_gradients(tmp_path):
    plan = plan_of(tmp_path, 2, data=1, pipeline=2, accumulation=4)
    told = " ".join(each.change for each in judge_bench([waits(plan, 0.1, 0.1)], "strong").advice)
    assert "gradients are reduced" not in told


def test_where_context_ranks_send_messages_too_the_bubble_is_unknown(tmp_path):
    plan = plan_of(tmp_path, 4, data=1, pipeline=2, context=2, accumulation=4)
    verdict = judge_bench([waits(plan, 0.1, 0.1, 0.1, 0.1)], "strong")
    assert verdict.rows[0].bubble is None
    text = "\n".join(bench_lines(verdict))
    assert "bubble not measured; 20% by the schedule" in text
    assert "stage 0: waits for communication 50% of a step\n" in text


def test_s1_2_the_fastest_of_a_sweep_is_named_where_it_is_told_apart(tmp_path):
    plan, values = plan_of(tmp_path, 2), ["1MiB", "4MiB", "25MiB"]
    steps = [measured(plan, s, steps=(s, 1.02 * s, 1.04 * s) * 2) for s in (1.2, 1.0, 1.5)]
    found = judge_settings("train.bucket", values, steps)
    assert (found.fastest, found.is_clear) == ("4MiB", True)
    assert "a step, 33% less than 25MiB; the medians' 95 % intervals do" in found.sentence
    assert "4MiB" in "\n".join(setting_lines(found))


def test_values_that_differ_less_than_their_steps_are_not_told_apart(tmp_path):
    plan = plan_of(tmp_path, 2)
    steps = [measured(plan, s, steps=(0.5 * s, s, 1.5 * s) * 2) for s in (1.0, 1.01)]
    found = judge_settings("train.bucket", ["1MiB", "25MiB"], steps)
    assert not found.is_clear
    assert found.sentence.startswith("no verdict: train.bucket=1MiB (500 ms to 1.5 s, n 6) is not")
    assert "told apart from 25MiB (505 ms to 1.52 s, n 6)" in found.sentence
    assert "vary up to 3.0 times" in found.caution
    assert "caution     steps vary" in "\n".join(setting_lines(found))


def test_medians_of_a_busy_machine_that_lie_far_apart_with_overlapping_steps_are_no_verdict(
    tmp_path,
):
    plan = plan_of(tmp_path, 2)  # measured once, the same program both times
    slow = (94.8, 100.0, 110.0, 130.0, 150.0, 175.0)
    quick = (85.5, 86.0, 88.0, 90.0, 92.0, 110.0)
    steps = [measured(plan, 0.1, steps=each) for each in (slow, quick)]
    assert not judge_settings("train.bucket", ["1MiB", "25MiB"], steps).is_clear
    apart = [measured(plan, 0.1, steps=each) for each in (slow, (80.0,) * 6)]
    assert judge_settings("train.bucket", ["1MiB", "25MiB"], apart).is_clear
    few = [measured(plan, 0.1, steps=each) for each in (slow[:5], (80.0,) * 5)]
    found = judge_settings("train.bucket", ["1MiB", "25MiB"], few)
    assert not found.is_clear
    assert "n 5: too few for an interval" in found.sentence


def test_a_sweep_whose_rounds_disagree_names_no_fastest(tmp_path):
    plan, values = plan_of(tmp_path, 2), ["1MiB", "25MiB"]
    there = [measured(plan, s, steps=(s, 1.01 * s, 1.02 * s)) for s in (1.0, 1.4)]
    back = [measured(plan, s, steps=(s, 1.01 * s, 1.02 * s)) for s in (1.1, 1.05)]
    found = judge_settings("train.bucket", values, there, back)
    assert not found.is_clear
    assert "not told apart from 25MiB" in found.sentence
    agreed = judge_settings("train.bucket", values, there, there)
    assert (agreed.fastest, agreed.is_clear, agreed.rows[0].num_steps) == ("1MiB", True, 6)


def test_reducing_gradients_less_often_gains_no_more_than_what_reductions_were_measured_to_take(
    tmp_path,
):
    plan = plan_of(tmp_path, 2)
    advice = judge_bench([measured(plan, 1.0, exposed=0.05)], "strong").advice
    seen = {each.change: each.gain for each in advice if each.limit == "communication"}
    (less_often,) = (gain for change, gain in seen.items() if "half as often" in change)
    assert 0 < less_often <= seen["hide all of it behind computation"]


def test_the_same_change_is_advised_once_though_it_helps_against_several_limits(tmp_path):
    plan = plan_of(tmp_path, 2, data=1, pipeline=2, accumulation=4)
    slow_end = {"bookkeeping": 0.2, "optimizer": 0.2}
    verdict = judge_bench([waits(plan, 0.3, 0.4, shares=slow_end)], "strong")
    settings = [each.change.partition(":")[0] for each in verdict.advice]
    assert settings.count("train.global_batch=8") == 1
    assert len(set(settings)) == len(settings)


def test_a_wait_in_the_vote_is_communication_and_not_advised_again_as_overhead(tmp_path):
    verdict = verdict_of(tmp_path, 0.8, exposed=0.4, shares={"agree": 0.3})
    assert verdict.limits == "communication"
    assert "overhead" not in {each.limit for each in verdict.advice}
    slow_norm = verdict_of(tmp_path, 0.8, exposed=0.1, shares={"agree": 0.5})
    assert slow_norm.limits == "overhead"


def test_what_takes_the_largest_share_of_a_step_is_what_limits_it(tmp_path):
    plan = plan_of(tmp_path, 2, data=1, pipeline=2, accumulation=16)
    verdict = judge_bench([waits(plan, 0.3, 0.3)], "strong")
    assert verdict.advice[0].limit == "communication"  # a bound of +25 %; the bubble's +5 %
    assert verdict.limits == "bubble"
