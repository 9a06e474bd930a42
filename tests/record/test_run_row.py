"""One run in a row: its state, its losses, what is promised of its numbers, what cannot be read."""

import pytest
from tests.record.made_runs import (
    AT,
    JOB,
    add_line,
    evaluated,
    finished,
    job_with,
    make_run,
    started,
)

from paceline.record.ownership import claim_control, hold_agents
from paceline.record.run_row import read_row


def test_a_run_that_ended_has_the_outcome_it_recorded(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), finished()], losses=[3.0, 2.0])
    row = read_row(run)
    assert (row.state, row.step, row.num_steps, row.loss) == ("finished", 2, 100, 2.0)
    assert (row.memory_bytes, row.planned_memory_bytes) == (700, 1000)
    assert row.tokens_per_s == 1001.5
    assert row.ran_s == 100.0
    assert row.usd == pytest.approx(6.0 * 100 / 3600)


def test_a_run_whose_controller_was_killed_has_crashed_and_one_that_is_held_runs(tmp_path):
    run = make_run(tmp_path / "a", events=[started()], losses=[3.0])
    assert read_row(run).state == "crashed"
    with claim_control(run, patience_s=0.0):
        assert read_row(run).state == "running"
    assert read_row(run).state == "crashed"


def test_a_run_whose_workers_live_without_a_controller_runs(tmp_path):
    run = make_run(tmp_path / "a", events=[started()])
    with hold_agents(run):
        assert read_row(run).state == "running"


def test_asking_whether_a_run_lives_writes_nothing_into_its_folder(tmp_path):
    run = make_run(tmp_path / "a", events=[started()])
    before = sorted(path.name for path in run.iterdir())
    read_row(run)
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_run_that_was_made_and_not_started_is_new_and_promises_nothing(tmp_path):
    row = read_row(make_run(tmp_path / "a"))
    assert (row.state, row.exactness, row.started_at) == ("new", "unknown", None)


def test_a_resumed_run_that_is_not_over_again_does_not_count_as_finished(tmp_path):
    events = [started(), finished(outcome="interrupted"), started(AT + 200)]
    row = read_row(make_run(tmp_path / "a", events=events, losses=[3.0]))
    assert (row.state, row.state_digest) == ("crashed", None)


def test_the_evaluation_loss_is_there_while_the_run_goes_on(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), evaluated(10, 2.5), evaluated(20, 2.7)])
    row = read_row(run)
    assert (row.eval_loss, row.eval_step, row.best_eval_loss) == (2.7, 20, 2.5)


def test_the_evaluation_loss_of_a_resumed_run_is_the_newest_and_not_that_of_its_last_end(tmp_path):
    events = [started(), evaluated(36, 3.0644), finished(held_out_loss=3.0644)]
    run = make_run(tmp_path / "a", events=[*events, started(AT + 200), evaluated(60, 2.7038)])
    assert read_row(run).eval_loss == 2.7038


def test_an_evaluation_that_was_not_finite_is_unknown_and_not_the_one_before(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), evaluated(10, 2.5), evaluated(20, None)])
    row = read_row(run)
    assert (row.eval_loss, row.eval_step, row.best_eval_loss) == (None, 20, 2.5)


def test_a_run_in_one_layout_on_cpus_is_bitwise(tmp_path):
    row = read_row(make_run(tmp_path / "a", events=[started(), started(AT + 9)]))
    assert row.exactness == "bitwise"


@pytest.mark.parametrize(
    "events",
    [
        [
            started(arithmetic={"layout.micro_batch": 4}),
            started(arithmetic={"layout.micro_batch": 2}),
        ],
        [started(), {"event": "ExactnessChanged", "at": AT, "exactness": "numeric"}],
        [started(), finished(exactness="numeric")],
    ],
    ids=["resumed otherwise", "shrank", "says so at its end"],
)
def test_a_run_whose_layout_changed_is_numeric(tmp_path, events):
    assert read_row(make_run(tmp_path / "a", events=events)).exactness == "numeric"


def test_s1_16_a_run_that_had_smaller_batches_is_different_to_its_end(tmp_path):
    different = {"event": "ExactnessChanged", "at": AT, "exactness": "different"}
    events = [started(), different, started(arithmetic={"layout.micro_batch": 2})]
    assert read_row(make_run(tmp_path / "a", events=events)).exactness == "different"


def test_a_run_that_need_not_be_deterministic_is_numeric(tmp_path):
    run = make_run(tmp_path / "a", events=[started()], job=job_with(deterministic=False))
    assert read_row(run).exactness == "numeric"


def test_a_damaged_line_of_the_events_is_named_and_the_run_is_not_new(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), evaluated(10, 2.5)], losses=[3.0])
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\x00\x93garbage\n")
    row = read_row(run)
    assert row.state == "damaged"
    assert row.damage.startswith("events.jsonl, line 3, cannot be read")
    assert row.eval_loss == 2.5


def test_a_line_that_a_crash_cut_short_is_no_damage(tmp_path):
    run = make_run(tmp_path / "a", events=[started()])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event":"Evaluated","at":1.0,"st\n')
    add_line(run / "events.jsonl", finished())
    assert read_row(run).state == "finished"


def test_steps_without_a_start_are_damage(tmp_path):
    row = read_row(make_run(tmp_path / "a", losses=[3.0, 2.0]))
    assert (row.state, row.step) == ("damaged", 2)
    assert "no start" in row.damage


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", "{"),
        ("job.yaml", "train: {"),
        ("job.yaml", "- a list"),
        ("plan.json", "[]"),
        ("metrics.jsonl", "nothing\n"),
    ],
)
def test_any_other_file_that_cannot_be_read_is_named(tmp_path, name, text):
    run = make_run(tmp_path / "a", events=[started()])
    (run / name).write_text(text)
    row = read_row(run)
    assert row.state == "damaged"
    assert name in row.damage


def test_a_damaged_run_that_goes_on_is_running_and_still_names_its_damage(tmp_path):
    run = make_run(tmp_path / "a", events=[started()])
    (run / "plan.json").write_text("[]")
    with claim_control(run, patience_s=0.0):
        row = read_row(run)
    assert row.state == "running"
    assert "plan.json" in row.damage


def test_an_event_of_a_later_version_counts_for_nothing(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), {"event": "Later", "at": AT, "step": 5}])
    assert read_row(run).damage is None


def test_a_line_longer_than_what_is_read_of_the_end_is_read_all_the_same(tmp_path):
    logged = {"logged": {f"name-{i}": 1.0 for i in range(5000)}}
    run = make_run(tmp_path / "a", events=[started()], losses=[3.0, 2.0, 1.0], lines=logged)
    assert read_row(run).loss == 1.0


def test_the_time_of_a_run_is_from_each_start_to_its_end_or_the_last_news(tmp_path):
    events = [started(AT), finished(AT + 20), started(AT + 100), evaluated(107, 1.0)]
    assert read_row(make_run(tmp_path / "a", events=events)).ran_s == 27.0


def test_a_script_is_its_processes_and_command_and_promises_nothing(tmp_path):
    job = {"name": "mine", "command": ["python", "train.py"], "processes": 2}
    starts = [{"event": "WorkerStarted", "at": AT, "generation": n, "node": 0} for n in (1, 1, 2)]
    run = make_run(tmp_path / "a", job=job, plan=None, events=[started(), *starts])
    row = read_row(run)
    assert (row.layout, row.exactness, row.restarts) == ("2 x python train.py", "unknown", 1)


def test_a_resume_for_want_of_memory_is_a_restart_and_one_by_hand_is_none(tmp_path):
    trains, ended = {"event": "TrainingStarted", "at": AT}, finished(AT + 1, "failed")
    again = [started(AT + 2), trains]
    by_hand = make_run(tmp_path / "a", events=[started(), trains, ended, *again])
    refit = {"event": "PlanChanged", "at": AT + 1}
    by_itself = make_run(tmp_path / "b", events=[started(), trains, ended, refit, *again])
    assert (read_row(by_hand).restarts, read_row(by_itself).restarts) == (0, 1)


def test_the_loss_of_a_script_is_the_newest_that_it_printed(tmp_path):
    job = {"name": "mine", "command": ["python", "train.py"]}
    run = make_run(tmp_path / "a", job=job, plan=None, events=[started()], losses=[3.0])
    add_line(run / "metrics.jsonl", {"step": 2, "at": AT + 2, "not_finite": [], "num_steps": 50})
    row = read_row(run)
    assert (row.step, row.loss) == (2, 3.0)
    add_line(run / "metrics.jsonl", {"step": 3, "at": AT + 3, "not_finite": ["loss"]})
    assert read_row(run).loss is None


def test_settings_of_a_job_with_aliases_between_sections_are_read(tmp_path):
    from paceline.record.run_files import read_settings

    text = b"train: &t {steps: 5}\nagain: *t\nlist:\n- a\n- b\n"
    assert read_settings(text) == {"train.steps": 5, "again.steps": 5, "list": ["a", "b"]}


def test_a_job_that_was_not_started_yet_shows_the_layout_of_its_plan(tmp_path):
    from dataclasses import asdict

    from paceline.parallel import Layout

    layout = Layout(data=2, sharding="none", micro_batch=4, accumulation=1)
    run = make_run(tmp_path / "a", job=JOB, plan={"layout": asdict(layout)})
    assert read_row(run).layout == layout.name


def test_a_plan_that_does_not_know_a_part_of_the_memory_is_no_damage(tmp_path):
    parts = {"parameters": 100, "activations": None}
    folder = make_run(tmp_path / "run", plan={"estimate": {"memory": {"parts": parts}}})
    row = read_row(folder)
    assert (row.damage, row.planned_memory_bytes) == (None, None)
