"""Alert rules: pure, on samples that the tests make."""

import re

import pytest
from tests.plan.scene import JOB as PLANNED
from tests.plan.scene import plan_of

from paceline.control.alerts import EVENTS, Rules, check_names, is_firing, rules_of
from paceline.job.alerts import AlertSpec, AlertsSpec, ConditionSpec, PlateauSpec
from paceline.launch.default_alerts import alerts
from paceline.record.events import AlertFired, AlertOver
from paceline.record.samples import Sample

Change = AlertFired | AlertOver


def judged(rule: AlertSpec, *values: float | None, of: str = "", every_s: float = 1.0) -> str:
    """One letter a sample, `every_s` apart: F fires, o over, `.` nothing."""
    rules = Rules([rule])
    return "".join(letter(list(rules.take(sample(rule, value, every_s * number, of))))
                   for number, value in enumerate(values))  # fmt: skip


def sample(rule: AlertSpec, value: float | None, at: float, of: str = "") -> Sample:
    metric = rule.metric or f"event {rule.event}"
    return Sample(metric=metric, value=value, at=at, of=of, step=int(at))


def letter(changes: list[Change]) -> str:
    assert len(changes) <= 1
    return "." if not changes else "F" if isinstance(changes[0], AlertFired) else "o"


LOSS = AlertSpec(name="high", metric="train/loss", above=10.0)


def test_a_rule_fires_once_while_it_holds_and_is_over_once():
    assert judged(LOSS, 2, 12, 13, 14, 2, 2) == ".F..o."


def test_a_limit_itself_is_neither_above_nor_below_it():
    assert judged(LOSS, 10.0) == "."
    assert judged(AlertSpec(name="low", metric="eval/loss", below=1.0), 1.0, 0.9) == ".F"


def test_samples_in_a_row_are_counted_anew_after_one_that_is_fine():
    rule = AlertSpec(name="slow", metric="speed/tokens_per_s", below=100.0, steps=3)
    assert judged(rule, 50, 50, 200, 50, 50, 50, 50, 200) == ".....F.o"


def test_a_duration_begins_with_the_first_sample_also_at_time_zero():
    rule = AlertSpec(name="hot", metric="gpu/temperature_c", above=85.0, lasting=60.0)
    assert judged(rule, 90, 90, 90, 90, 90, every_s=20.0) == "...F."
    assert judged(rule, 90, 90, 80, 90, 90, 90, every_s=20.0) == "......"


def test_a_number_that_is_not_finite_is_its_own_condition():
    rule = AlertSpec(name="nan", metric="train/loss", not_finite=True)
    assert judged(rule, 1.0, None, None, 1e30) == ".F.o"
    assert judged(LOSS, None) == "."


def test_a_plateau_counts_samples_without_an_improvement_by_more_than_its_least():
    plateau = PlateauSpec(patience=3, min_delta=0.1)
    rule = AlertSpec(name="flat", metric="eval/loss", plateau=plateau)
    assert judged(rule, 3.0, 2.0, 1.95, 1.91, None, 1.91, 1.0) == "....F.o"


def test_a_plateau_of_an_accuracy_waits_for_a_higher_one():
    plateau = PlateauSpec(patience=2, best="highest")
    rule = AlertSpec(name="flat", metric="eval/accuracy", plateau=plateau)
    assert judged(rule, 0.5, 0.6, 0.6, 0.59, 0.7) == "...Fo"


def test_a_rule_that_holds_anew_waits_for_its_pause():
    rule = AlertSpec(name="high", metric="train/loss", above=10.0, again=5.0)
    assert judged(rule, 12, 2, 12, 12, 12, 12, 12, 2, 12) == "Fo...F.o."


def test_never_again_is_once_in_a_run():
    rule = AlertSpec(name="high", metric="train/loss", above=10.0, again="never")
    assert judged(rule, 12, 2, 12, 2, every_s=1e6) == "Fo.."


def test_an_event_fires_at_once_and_again_after_its_pause():
    rule = AlertSpec(name="lost", event="WorkerLost", again=10.0)
    assert judged(rule, None, None, None, every_s=6.0) == "F.F"


def test_each_gpu_is_judged_by_itself():
    rules = Rules([AlertSpec(name="hot", metric="gpu/temperature_c", above=85.0)])
    for of in ("node 0 GPU 0", "node 0 GPU 1"):
        (fired,) = rules.take(sample(rules.rules[0], 90.0, 1.0, of))
        assert isinstance(fired, AlertFired)
        assert fired.of == of


def test_a_condition_on_another_metric_is_of_the_same_gpu():
    rule = AlertSpec(
        name="spins",
        metric="gpu/power_share",
        below=0.35,
        when=ConditionSpec(metric="gpu/utilization", above=0.95),
    )
    rules = Rules([rule])

    def share(of: str) -> list[Change]:
        return list(rules.take(sample(rule, 0.2, 1.0, of)))

    assert share("GPU 0") == []  # nothing is known of its utilization
    for of, utilization in (("GPU 0", 0.99), ("GPU 1", 0.5)):
        use = Sample(metric="gpu/utilization", value=utilization, at=1.0, of=of)
        assert list(rules.take(use)) == []
    assert [type(change) for change in share("GPU 0")] == [AlertFired]
    assert share("GPU 1") == []


def test_what_the_record_says_is_not_reported_again():
    first = Rules([LOSS])
    fired = list(first.take(sample(LOSS, 12.0, 1.0)))
    second = Rules([LOSS])
    list(second.take(sample(LOSS, 12.0, 1.0)))
    second.resume(fired)
    assert list(second.take(sample(LOSS, 12.0, 2.0))) == []
    (over,) = second.take(sample(LOSS, 2.0, 3.0))
    assert isinstance(over, AlertOver)
    assert list(second.take(sample(LOSS, 12.0, 4.0))) == []  # within its pause


def test_what_nobody_reported_is_reported_by_the_next_controller():
    rules = Rules([LOSS])
    list(rules.take(sample(LOSS, 12.0, 1.0)))
    rules.resume([])
    (fired,) = rules.take(sample(LOSS, 12.0, 2.0))
    assert isinstance(fired, AlertFired)


def test_an_alert_names_its_targets_or_those_of_all_rules():
    quiet = AlertSpec(name="quiet", metric="train/loss", above=10.0, to=[])
    rules = Rules([LOSS, quiet], to=("ops",))
    assert [change.to for change in rules.take(sample(LOSS, 12.0, 1.0))] == [["ops"], []]


def test_a_rule_of_the_job_takes_the_place_of_a_built_in_one_of_its_name():
    built_in = [LOSS, AlertSpec(name="hot", metric="gpu/temperature_c", above=85.0)]
    own = AlertSpec(name="hot", metric="gpu/temperature_c", above=70.0)
    assert rules_of(AlertsSpec(rules=[own]), built_in) == [LOSS, own]
    assert rules_of(AlertsSpec(rules=[own], defaults=False), built_in) == [own]
    assert rules_of(AlertsSpec(without=["high"]), built_in) == built_in[1:]


def test_alerts_that_are_over_and_those_on_events_do_not_fire_any_more():
    high = AlertFired(rule="high", condition="train/loss > 10", metric="train/loss", value=12.0)
    event = AlertFired(rule="lost", condition="event WorkerLost", metric="WorkerLost", value=None)
    over = AlertOver(rule="high", metric="train/loss", value=2.0)
    assert is_firing([high, event]) == [high]
    assert is_firing([high, event, over]) == []


def where(path: tuple[str | int, ...]) -> str:
    return f"{path} of rules.yaml"


@pytest.mark.parametrize(
    ("rule", "nearest"),
    [
        (AlertSpec(name="a", metric="train/los", above=1.0), "train/loss"),
        (AlertSpec(name="a", event="WorkerLst"), "WorkerLost"),
        (
            AlertSpec(
                name="a",
                metric="train/loss",
                above=1.0,
                when=ConditionSpec(metric="gpu/utilisation", above=0.5),
            ),
            "gpu/utilization",
        ),
    ],
)
def test_a_name_that_no_run_has_is_refused_with_the_nearest(rule: AlertSpec, nearest: str):
    (problem,) = check_names(AlertsSpec(rules=[rule]), where, logs_its_own=False)
    assert problem.code == "J017"
    assert problem.fix == f"did you mean `{nearest}`?"
    assert "('rules', 0" in problem.where


def test_a_program_of_ones_own_may_log_metrics_of_any_name():
    rules = AlertsSpec(rules=[AlertSpec(name="a", metric="val/f1", below=0.5)])
    assert list(check_names(rules, where, logs_its_own=True)) == []


def test_a_metric_may_be_named_as_other_tools_and_the_file_name_it():
    own = AlertSpec(
        name="a", metric="val_loss", above=5.0, when=ConditionSpec(metric="loss", below=1.0)
    )
    (rule,) = rules_of(AlertsSpec(rules=[own]), [])
    assert rule.metric == "eval/loss"
    assert rule.when is not None
    assert rule.when.metric == "train/loss"
    assert list(check_names(AlertsSpec(rules=[own]), where, logs_its_own=False)) == []


def test_no_alert_is_about_alerts():
    assert "WorkerLost" in EVENTS
    assert "AlertFired" not in EVENTS


def test_s3_6_gradients_of_zero_and_a_collapsed_loss_scale_are_alerts_of_every_run():
    rules = {rule.name: rule for rule in alerts(None)}
    assert judged(rules["no-gradient"], 0.3, 0.0, 0.0, 0.0, 0.0, 0.2) == "...F.o"
    assert judged(rules["loss-scale-low"], 4.0, 2.0, 1.0, 0.5, 2.0) == "...Fo"


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_full_memory_is_answered_with_a_setting_that_changes_the_plan(micro_batch: int):
    """Of one sample at a time there is no half."""
    plan = plan_of(PLANNED, f"layout.micro_batch={micro_batch}")
    (rule,) = (each for each in alerts(plan) if each.name == "memory-full")
    settings = re.findall(r"layout\.(\w+)=(\S+)", rule.action)
    assert settings
    assert all(str(getattr(plan.layout, name)) != value for name, value in settings)
