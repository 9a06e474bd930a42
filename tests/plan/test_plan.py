"""What is chosen, why, and what is said when nothing fits."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.plan.scene import JOB, TINY, cluster_of, job_of, plan_of

from paceline.cli.plan import command
from paceline.errors import JobError, PlanError, Problem
from paceline.plan import make_plan, plan_from_json, plan_job, plan_to_json
from paceline.plan.choose import limit_bytes
from paceline.profile import ModuleFacts, profile_module
from paceline.report.plan_text import format_plan


def refused(*overrides: str) -> Problem:
    with pytest.raises(PlanError) as caught:
        plan_of(JOB, *overrides)
    assert caught.value.exit_code == 3
    (problem,) = caught.value.problems
    return problem


def reasons(*overrides: str, text: str = JOB) -> dict[str, str]:
    plan = plan_of(text, *overrides)
    return {each.field: f"{each.value}: {each.reason}" for each in plan.decisions}


def test_a_small_model_takes_the_simplest_layout():
    plan = plan_of(TINY)
    assert plan.layout.sharding == "none"
    assert (plan.layout.micro_batch, plan.layout.accumulation) == (8, 1)


def test_a_model_too_large_for_one_accelerator_is_sharded():
    plan = plan_of()
    assert plan.layout.sharding == "full"
    assert "DDP over 8 ranks needs at least" in reasons()["layout.sharding"]


def test_the_chosen_layout_leaves_head_room():
    plan = plan_of()
    total = plan.estimate.memory.total_bytes
    assert total is not None
    assert total <= limit_bytes(plan.cluster.usable_bytes) < plan.cluster.usable_bytes


def test_every_other_layout_is_there_with_a_reason():
    plan = plan_of()
    layouts = [each.layout for each in plan.rejected]
    assert len(layouts) == len(set(layouts))
    assert plan.layout not in layouts
    assert all(each.reason for each in plan.rejected)


def test_what_the_job_fixed_is_kept_and_not_decided():
    plan = plan_of(TINY, "layout.sharding=full", "layout.micro_batch=2")
    assert (plan.layout.sharding, plan.layout.micro_batch) == ("full", 2)
    assert not any(each.field.startswith("layout.") for each in plan.decisions)


def test_precision_follows_the_accelerator():
    assert plan_of().precision == "bf16"
    assert plan_of(TINY, "train.precision=auto").precision == "fp32"
    assert plan_of(TINY, "train.precision=bf16").precision == "bf16"


def test_bf16_on_an_accelerator_without_it_is_refused():
    problem = refused("cluster.accelerator=V100-32", "train.precision=bf16")
    assert problem.code == "L003"


@pytest.mark.parametrize(("steps", "checkpoint"), [(600, 60), (3, 1), (100_000, 500)])
def test_checkpoints_come_every_tenth_of_the_run_500_at_most(steps: int, checkpoint: int):
    plan = plan_of(TINY, f"train.steps={steps}")
    assert plan.checkpoint_every == checkpoint
    assert plan.evaluate_every == max(1, steps // 10)


def test_intervals_that_are_given_are_kept():
    plan = plan_of(TINY, "checkpoint.every=7", "evaluate.every=9")
    assert (plan.checkpoint_every, plan.evaluate_every) == (7, 9)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest():
    problem = refused("train.global_batch=60")
    assert problem.code == "L001"
    assert "56 or 64" in problem.fix


def test_nothing_fits_says_where_the_memory_goes_and_what_would_help():
    problem = refused("data.seq_len=8192", "train.global_batch=512")
    assert problem.code == "P001"
    assert "activations" in problem.what
    assert "set cluster.nodes to 2, which is 16 ranks" in problem.fix
    assert "shorten data.seq_len from 8192 to" in problem.fix


def test_what_would_help_really_helps():
    problem = refused("data.seq_len=8192", "train.global_batch=512")
    shorter = problem.fix.partition("from 8192 to ")[2].partition(";")[0]
    big = ("train.global_batch=512",)
    assert plan_of(JOB, f"data.seq_len={shorter}", *big).layout.sharding == "full"
    assert plan_of(JOB, "data.seq_len=8192", "cluster.nodes=2", *big).layout.data == 16


def test_a_fixed_choice_that_keeps_it_from_fitting_is_named_first():
    problem = refused("layout.sharding=none")
    assert problem.fix.startswith("leave layout.sharding at auto: sharded")


def test_a_fault_that_cannot_fire_is_said():
    assert "rank=8@step=9 never fires" in reasons("drill.kill=[rank=8@step=9]")["drill.kill"]


def test_a_module_of_your_own_is_planned_with_unknown_time():
    job = job_of(TINY, "model={factory: 'm:f'}", "program=m:t")
    facts = ModuleFacts(num_parameters=4482, largest_block_parameters=0, num_blocks=0)
    plan = make_plan(job, cluster_of(job), profile_module(facts))
    assert plan.estimate.step_s is None
    assert plan.layout.accumulation == 1
    assert "unknown" in format_plan(plan)
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize("text", [JOB, TINY])
def test_a_plan_reads_back_equal(text: str):
    plan = plan_of(text)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_the_screen_fits_in_100_columns_and_shows_the_equation():
    for text in (JOB, TINY):
        screen = format_plan(plan_of(text))
        assert max(len(line) for line in screen.splitlines()) <= 100
        assert len(screen.splitlines()) <= 45
        assert "samples a step" in screen
        assert "estimated" in screen


def test_the_job_of_this_machine_is_planned_end_to_end():
    plan = plan_job(job_of(TINY))
    assert plan.cluster.is_local
    assert plan.decoder is not None
    assert plan.profile.num_parameters == 668_544


def test_what_a_config_asks_for_and_the_decoder_lacks_is_a_decision(tmp_path: Path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 256,
        "rope_scaling": {"rope_type": "llama3"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "config.json"
    assert "llama3" in reasons(f"model={{hf_config: {path}}}", text=TINY)["model.hf_config"]


def test_the_command_prints_a_screen_or_json(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(TINY)
    screen = CliRunner().invoke(command, [str(tmp_path / "job.yaml")])
    assert screen.exit_code == 0
    assert screen.output.startswith("layout      DDP over 2 ranks")
    done = CliRunner().invoke(command, [str(tmp_path / "job.yaml"), "--json"])
    assert json.loads(done.output)["layout"]["micro_batch"] == 8


def test_the_command_takes_overrides_and_lets_errors_through(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(TINY)
    arguments = [str(tmp_path / "job.yaml"), "--set", "cluster.accelerator=H1000"]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, JobError)


def test_the_help_lists_the_names_of_the_catalog():
    result = CliRunner().invoke(command, ["--help"])
    assert "llama-3-8b" in result.output
    assert "H100-SXM" in result.output
