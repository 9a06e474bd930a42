"""The job file: everything wrong at once, each with its line and what to write instead."""

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from paceline import units
from paceline.errors import JobError, Problem
from paceline.job import Job, dump_job, job_schema, load_job, parse_job
from paceline.job.data_rules import check_names_data

GOOD = """\
name: try
model:
  decoder: {layers: 2, hidden: 32, heads: 2}
data: {path: "text/*.txt", seq_len: 16}
train:
  global_batch: 8
  steps: 100
"""


def parse(text: str, *overrides: str) -> Job:
    return parse_job(text, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def problems(text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        parse(text, *overrides)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def only(text: str, *overrides: str) -> Problem:
    (problem,) = problems(text, *overrides)
    return problem


def test_every_problem_is_shown_at_once_in_the_order_of_the_file():
    text = """\
model:
  decoder: {layers: zero, hidden: 32, heads: 2}
data: {path: x, held_out: 3}
train:
  global_batch: -1
  stepz: 100
"""
    found = problems(text)
    assert [problem.where for problem in found] == [
        "model.decoder.layers, job.yaml line 2",
        "data.held_out, job.yaml line 3",
        "train.global_batch, job.yaml line 5",
        "train.stepz, job.yaml line 6",
    ]


def test_an_unknown_key_names_the_nearest_one():
    problem = only(GOOD + "  lerning_rate: 1\n")
    assert problem.code == "J004"
    assert problem.fix == "did you mean `learning_rate`?"
    assert problem.where.endswith("job.yaml line 8")


@pytest.mark.parametrize(
    "override",
    [f"name={bad}" for bad in ("../../evil", "$(id)", "-rf", "a/b")]
    + [f"cluster.nodes={bad}" for bad in ("0", "-1", "1e17")],
)
def test_s4_21_names_that_are_paths_or_commands_and_counts_of_nothing_are_refused(override):
    problem = only(GOOD, override)
    assert problem.code == "J006"
    assert override.partition("=")[0] in problem.what
    assert problem.fix


def test_a_known_key_in_the_wrong_place_is_told_its_section():
    assert only(GOOD + "micro_batch: 4\n").fix == "it belongs under `layout`"


@pytest.mark.parametrize(
    ("key", "meant"), [("checkpoint.path", "copy_to"), ("cluster.gpus_per_node", "per_node")]
)
def test_a_key_by_another_name_stays_in_its_section(key, meant):
    """Of both another section was named: `data`, `slurm`."""
    assert only(GOOD, f"{key}=8").fix == f"did you mean `{meant}`?"


def test_a_key_like_none_lists_the_known_ones():
    assert only(GOOD + "  zzz: 1\n").fix.startswith("known keys are global_batch, steps,")


def test_the_fix_is_the_text_to_type():
    """It read: 35 keys of `train`; a list of text; correct the line."""
    assert only("model: {preset: llama-3-8b}\n").fix == (
        "add `train: {global_batch: 128, steps: 1000}`"
    )
    parse("model: {preset: llama-3-8b}\ntrain: {global_batch: 128, steps: 1000}\n")
    receivers = only(GOOD, "alerts.to='ops, night 7'")
    assert receivers.fix == "write a list of text: `to: [ops, night, '7']`"
    open_brace = only("model: {preset: llama-3-8b\ntrain: {steps: 3}\nname: x\n")
    assert open_brace.fix == "close the { that line 1 opens"


def test_a_missing_field_says_what_it_is_for():
    problem = only(GOOD.replace("  global_batch: 8\n", ""))
    assert problem.code == "J005"
    assert problem.what == "`train.global_batch` is missing"
    assert problem.fix.startswith("add it (samples in one optimizer step, over all ranks")
    assert problem.fix.endswith("): write a whole number above 0")


def test_a_required_key_that_is_misspelled_is_one_error():
    problem = only(GOOD.replace("global_batch: 8", "global_bach: 8"))
    assert (problem.code, problem.fix) == ("J004", "did you mean `global_batch`?")


@pytest.mark.parametrize(
    ("assignment", "fix"),
    [
        ("train.precision=int8", "choose one of 'auto', 'fp32', 'tf32', 'bf16', 'fp16', 'fp8'"),
        ("train.steps=0", "write a whole number above 0"),
        ("train.seed=-1", "write a whole number of at least 0 and below 9.22337e+18"),
        ("data.held_out=2", "write a number of at least 0 and below 1"),
        ("train.clip_norm=-1", "write a number above 0, or null"),
        ("layout.micro_batch=many", "write a whole number above 0, or 'auto'"),
        ("metrics.tensorboard=perhaps", "write true or false"),
        (
            "data.path=3",
            (
                "write text, or a list of text, or null; in quotes a number is text: "
                """--set 'data.path="3"'"""
            ),
        ),
        (
            "checkpoint=3",
            (
                "write keys below it: every, keep_last, keep_every, keep_best, copy_to, copy_keep, "
                "compress"
            ),
        ),
        ("cluster.memory=lots", "write a number or text such as '80 GiB' above 0, or 'auto'"),
    ],
)
def test_a_wrong_value_is_told_what_to_write(assignment: str, fix: str):
    problem = only(GOOD, assignment)
    assert problem.code == "J006"
    assert problem.fix == fix
    assert problem.where == f"{assignment.split('=')[0]}, --set"


DURATION = "write a number or text such as '30m' above 0"


@pytest.mark.parametrize(
    ("assignment", "says", "fix"),
    [
        ("train.steps=many", "is 'many': not a whole number", "write a whole number above 0"),
        ("recovery.lease=0s", "it has to be greater than 0", DURATION),
        ("recovery.patience=1e99s", "longer than 30 days, which is never", DURATION),
        ("recovery.patience=.inf", "finite number", DURATION),
        ("recovery.heartbeat=0", "greater than 0", DURATION),
        ("recovery.grace=-3s", "'-3s' is not a duration", DURATION),
        ("recovery.strike_window=0", "greater than 0", DURATION),
        ("recovery.replace_timeout=0", "greater than 0", DURATION),
        (
            "recovery.fingerprint_every=-1",
            "equal to 0",
            "write a whole number of at least 0, or 'auto'",
        ),
        (
            "recovery.snapshot_every=-1",
            "equal to 0",
            "write a whole number of at least 0, or 'auto'",
        ),
        (
            "recovery.spares=-1",
            "equal to 0",
            "write a whole number of at least 0 and of at most 1024, or 'auto'",
        ),
        ("recovery.max_restarts=-1", "equal to 0", "write a whole number of at least 0"),
        ("recovery.node_strikes=0", "than 0", "write a whole number above 0"),
        ("checkpoint.copy_keep=0", "than 0", "write a whole number above 0"),
        (
            "checkpoint.copy_to=/mnt/copies",
            "this names no place in a storage; a folder is file:///mnt/copies",
            "write text such as 's3://bucket/prefix', or null",
        ),
        (
            "checkpoint.copy_to='s3://'",
            "this names no place in a storage",
            "write text such as 's3://bucket/prefix', or null",
        ),
    ],
)
def test_a_wrong_field_of_recovery_is_refused_with_its_place_and_what_to_write(
    assignment: str, says: str, fix: str
):
    problem = only(GOOD, assignment)
    assert problem.code == "J006"
    assert says in problem.what
    assert problem.fix == fix
    assert problem.where == f"{assignment.split('=')[0]}, --set"


def test_a_storage_that_fsspec_does_not_know_is_refused_before_anything_runs():
    pytest.importorskip("fsspec")
    problem = only(GOOD, "checkpoint.copy_to=foo://x")
    assert "fsspec knows no storage foo://" in problem.what
    assert problem.fix == "write text such as 's3://bucket/prefix', or null"
    good = parse(GOOD, "checkpoint.copy_to=simplecache::file:///mnt/nas").spec.checkpoint
    assert good.copy_to == "simplecache::file:///mnt/nas"


def test_snapshots_are_switched_off_by_zero():
    assert parse(GOOD, "recovery.snapshot_every=0").spec.recovery.snapshot_every == 0


def test_a_fault_that_is_none_is_refused_at_its_place_with_how_to_write_one():
    problem = only(GOOD + "drill: {faults: [kill rank=1 rank=2 step=3]}\n")
    assert problem.where == "drill.faults[0], job.yaml line 8"
    assert "rank= is written twice; keep one of them, or write rank=1+2" in problem.what
    assert problem.fix == "write a list of text such as 'kill rank=1 step=150 phase=backward'"


def test_sizes_take_units():
    cluster = parse(
        GOOD, "cluster.memory=80 GiB", "cluster.network=400Gb/s", "recovery.grace=2m"
    ).spec
    assert cluster.cluster.memory == 80 * 2**30
    assert cluster.cluster.network == 50e9
    assert cluster.recovery.grace == 120


def test_a_size_without_a_unit_of_its_kind_is_refused():
    assert "400Gb/s or 50GB/s" in only(GOOD, "cluster.network=12 apples").what


def test_set_goes_over_the_file_and_into_sections_that_are_not_there():
    job = parse(GOOD, "train.global_batch=64", "layout.sharding=full")
    assert job.spec.train.global_batch == 64
    assert job.spec.layout.sharding == "full"
    assert job.where("train.global_batch") == "train.global_batch, --set"
    assert job.where("train.steps") == "train.steps, job.yaml line 7"


def test_set_replaces_a_whole_section():
    job = parse(GOOD, "model={preset: llama-3-8b}")
    assert job.spec.model.decoder is None
    assert job.spec.model.preset == "llama-3-8b"


@pytest.mark.parametrize("assignment", ["train.steps", "=3", "train..steps=3"])
def test_a_malformed_override_says_how_to_write_it(assignment: str):
    problem = only(GOOD, assignment)
    assert problem.code == "J003"
    assert problem.fix == "write it like --set train.global_batch=64"


def test_a_field_that_is_nowhere_in_the_file_is_placed_at_its_section():
    assert parse(GOOD).where("train.seed") == "train.seed, job.yaml line 5"
    assert parse(GOOD).where("layout.sharding") == "layout.sharding, job.yaml"


def test_a_dumped_job_reads_back_equal():
    job = parse(GOOD, "cluster.network=400Gb/s", "drill.kill=[rank=1@step=5@save]")
    assert parse(dump_job(job.spec)).spec == job.spec


def test_a_key_written_twice_names_both_lines():
    problem = only(GOOD + "  steps: 200\n")
    assert problem.code == "J002"
    assert problem.what == "`train.steps` is written twice, on line 7 and line 8"


def test_text_that_is_no_yaml_names_the_line():
    problem = only("model: {decoder: {layers: 2\ntrain:\n  steps: 3\n")
    assert problem.code == "J002"
    assert "job.yaml line" in problem.where


def test_yaml_that_is_no_mapping_is_refused():
    assert only("- a\n- b\n").what == "a job is keys and values, this is a list"


def test_an_empty_file_says_what_is_missing():
    assert [problem.what for problem in problems("")] == [
        "`model` is missing",
        "`train` is missing",
    ]


def test_a_missing_file_names_the_nearest_one(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(GOOD)
    with pytest.raises(JobError) as caught:
        load_job(tmp_path / "jobs.yaml")
    (problem,) = caught.value.problems
    assert problem.code == "J001"
    assert problem.fix == f"did you mean {tmp_path / 'job.yaml'}?"


def test_a_folder_is_no_job_file(tmp_path: Path):
    with pytest.raises(JobError, match="J001"):
        load_job(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path):
    (tmp_path / "job.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(JobError, match="it is not UTF-8 text"):
        load_job(tmp_path / "job.yaml")


def test_paths_start_from_the_folder_of_the_file(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(GOOD)
    assert load_job(tmp_path / "job.yaml").folder == tmp_path.resolve()


def test_two_ways_to_say_the_model_clash():
    problem = only(GOOD, "model.preset=llama-3-8b")
    assert problem.code == "J007"
    assert problem.what == "the model is said 2 ways: decoder and preset"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["train.betas=[0.9, 0.98]", "train.optimizer=sgd"], "with train.optimizer: sgd nothing"),
        (["train.decay_steps=5"], "with train.schedule: cosine nothing uses it"),
        (
            ["recovery.shrink=false", "recovery.batch=shrink"],
            "recovery.batch is given, and with recovery.shrink: false nothing uses it",
        ),
        (["train.powersgd_rank=8"], "with train.gradient_compression: none nothing uses it"),
    ],
)
def test_a_setting_that_nothing_would_use_is_refused(given, says):
    problem = only(GOOD, *given)
    assert problem.code == "J007"
    assert says in problem.what


def test_a_decay_longer_than_the_run_is_refused():
    given = ["train.schedule=wsd", "train.decay_steps=60", "train.warmup_steps=50"]
    problem = only(GOOD, *given)
    assert problem.what == "warmup_steps 50 and decay_steps 60 are more than the run's 100 steps"
    assert problem.fix == "set train.decay_steps to 50 or less"


def test_no_way_to_say_the_model_is_refused():
    assert only(GOOD, "model={}").what == "the model is said 0 ways"


def test_a_job_without_data_needs_a_program_of_its_own_to_run():
    (problem,) = check_names_data(parse(GOOD, "data={}"))
    assert problem.code == "J007"
    assert "nothing to train on" in problem.what
    for has_its_own in ("program=train:main", "engine=megatron"):
        assert not list(check_names_data(parse(GOOD, "data={}", has_its_own)))


def test_epochs_without_data_cannot_be_counted():
    problem = only(GOOD.replace("  steps: 100\n", "  epochs: 2\n"), "data={}")
    assert problem.code == "J007"
    assert problem.what == "train.epochs cannot be counted: the job names no data"


def test_a_bucket_below_a_mebibyte_stays_when_another_field_is_replaced():
    train = parse(GOOD, "train.bucket=256KiB").spec.train
    assert replace(train, steps=7).bucket == 256 * 2**10
    assert "lacks its unit" in str(only(GOOD, "train.bucket=25"))


def test_a_fault_is_written_as_rank_and_step():
    assert "write it like `kill rank=1 step=150`" in only(GOOD, "drill.kill=[rank 1]").what


def test_s0_24_every_option_shown_in_the_job_file_that_init_writes_can_be_set():
    text = (files("paceline") / "templates" / "job.yaml").read_text()
    assert parse(text).spec.name == "my-job"
    shown = [line for line in text.splitlines() if re.match(r"  # \w+: ", line)]
    assert len(shown) == 4
    for line in shown:
        whole = text.replace(line, "  " + line.removeprefix("  # "))
        other_model = line.startswith(("  # preset", "  # pretrained"))
        parse(re.sub("  decoder: .*", "", whole) if other_model else whole)


def test_the_schema_carries_the_text_under_the_fields():
    schema = job_schema()
    assert schema["$defs"]["TrainSpec"]["properties"]["steps"]["description"].startswith(
        "Optimizer steps"
    )


def test_a_job_for_another_engine_needs_neither_program_nor_data():
    text = "model: {factory: 'own:make'}\nengine: megatron\ntrain: {global_batch: 8, steps: 9}\n"
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    assert job.spec.model.factory == "own:make"


@pytest.mark.parametrize("number", ["1e400", ".inf", ".nan", "1e305B", "9" * 500])
def test_sizes_that_are_no_finite_number_are_refused(number):
    problem = only(GOOD.replace("decoder: {layers: 2, hidden: 32, heads: 2}", f"size: {number}"))
    assert problem.code == "J006"
    assert "is no finite number" in problem.what


@pytest.mark.parametrize(
    ("parse_unit", "text"),
    [
        (units.parse_bytes, "1e400 GB"),
        (units.parse_bytes, float("nan")),
        (units.parse_count, float("inf")),
        (units.parse_bytes_per_s, "1e308GB/s"),
        (units.parse_bytes_per_s, "9x1e308B/s"),
        (units.parse_seconds, "1e400h"),
        (units.parse_seconds, 10**400),
    ],
)
def test_no_unit_makes_infinity(parse_unit, text):
    with pytest.raises(ValueError, match="is no finite number"):
        parse_unit(text)


@pytest.mark.parametrize("override", [f"data.seq_len={10**23}", f"train.steps={10**30}"])
def test_numbers_that_have_surely_a_digit_too_many_are_refused(override):
    assert only(GOOD, override).code == "J010"


def test_a_key_like_none_of_a_source_lists_those_of_sources():
    found = only(GOOD.replace('path: "text/*.txt"', "sources: [{path: x, zzz: 1}]"))
    assert found.fix.startswith("known keys are path,")


def test_a_name_where_a_section_belongs_is_answered_with_the_section():
    decoder = "model:\n  decoder: {layers: 2, hidden: 32, heads: 2}"
    problem = only(GOOD.replace(decoder, "model: llama-3-8b"))
    assert problem.code == "J006"
    assert problem.fix == "for example `model: {preset: llama-3-8b}`"


@pytest.mark.parametrize("number", [0.99996, 0.9997, 12.0, 999.6, 1234.5, 9.99e5, 3e9])
def test_no_number_on_a_screen_is_a_power_of_ten(number):
    shown = units.significant(number), units.significant(number, 2), units.format_seconds(number)
    assert not any("e+" in text for text in (*shown, units.format_count(number)))


@pytest.mark.parametrize("word", ["off", "yes"])
def test_a_name_that_yaml_reads_as_a_truth_is_to_be_put_in_quotes(word):
    problem = only(GOOD.replace("name: ", f"name: {word}  #", 1))
    assert problem.code == "J006"
    assert "unless they are in quotes" in (problem.fix or "")


@pytest.mark.parametrize(
    ("parse", "text"), [(units.parse_bytes, "80 GiB banana"), (units.parse_count, "7B and more")]
)
def test_words_behind_a_size_or_count_are_refused(parse, text):
    with pytest.raises(ValueError, match="write it like"):
        parse(text)


def test_a_unit_that_is_unknown_is_answered_with_those_that_are_taken():
    with pytest.raises(ValueError, match="unit of B, KB, MB, GB, TB, PB, KiB"):
        units.parse_bytes("1XB")
    with pytest.raises(ValueError, match="unit of us, ms, s, m, h or d"):
        units.parse_seconds("1fortnight")
    assert (units.parse_bytes("1PB"), units.parse_seconds("1us")) == (10**15, 1e-6)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2m 30s", 150), ("1h30m", 5400), ("5 minutes", 300), ("1 day 2 hours", 93_600)],
)
def test_a_duration_may_have_several_parts_and_long_words(text, seconds):
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["2m 30", "2m banana", "2m, 30s", "5 s/step"])
def test_no_part_of_a_duration_is_dropped(text):
    with pytest.raises(ValueError, match="is not a duration"):
        units.parse_seconds(text)
