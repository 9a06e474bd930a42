"""What is chosen, why, and what is said when nothing fits."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.plan.scene import JOB, TINY, cluster_of, job_of, plan_of, refused_of

from paceline.catalog import load_accelerators
from paceline.cli.plan import command
from paceline.errors import JobError, PlanError, Problem
from paceline.job import parse_job
from paceline.launch.ready import check_runs_here
from paceline.parallel import Layout
from paceline.plan import infeasible, make_plan, plan_from_json, plan_job, plan_to_json
from paceline.plan.case import case_of_plan
from paceline.plan.decision import Limit
from paceline.plan.host import check_building
from paceline.plan.limits import limit_problem
from paceline.plan.outlook import outlook
from paceline.plan.plan import fastest_layouts
from paceline.profile import ModuleFacts, profile_module, resolve_decoder, resolve_profile
from paceline.profile.block import Block, MeasuredCosts, block_parameters, dense_parameters
from paceline.report.plan_explain import explain_plan
from paceline.report.plan_text import _short, format_plan
from paceline.units import format_amount, format_seconds

ONLY_DATA = ("layout.tensor=1", "layout.pipeline=1", "layout.context=1")
TOO_LARGE = (
    "model.preset=llama-2-13b",
    "cluster.accelerator=L4",
    "cluster.per_node=1",
    "engine=torchtitan",  # which offloads on several ranks alone
)


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
    assert plan.layout.sharding != "none"
    (ddp,) = [each for each in plan.rejected if each.layout.name == "DDP over 8 ranks"]
    assert ddp.why.startswith("does not fit: needs")


def test_the_chosen_layout_leaves_head_room():
    plan = plan_of()
    total = plan.estimate.memory.total_bytes
    assert total is not None
    assert total <= plan.limit_bytes < plan.cluster.usable_bytes


def test_s0_4_every_other_layout_is_there_with_a_reason():
    plan = plan_of()
    layouts = [each.layout for each in plan.rejected]
    assert len(layouts) == len(set(layouts))
    assert plan.layout not in layouts
    assert all(each.reason for each in plan.rejected)


@pytest.mark.parametrize(
    ("engine", "is_wide"),
    [
        *(("paceline", True), ("torchtitan", True), ("torchtune", False), ("fsdp1", False)),
        *(("accelerate", False), ("deepspeed", False), ("megatron", False)),
    ],
)
def test_parameters_are_said_to_stay_in_float32_only_where_the_engine_keeps_them_so(
    engine: str, is_wide: bool
):
    plan = plan_of(JOB, f"engine={engine}")
    (reason,) = (each.reason for each in plan.decisions if each.field == "train.precision")
    assert reason.endswith("parameters and reductions stay fp32") == is_wide


def test_what_the_job_fixed_is_kept_and_not_decided():
    plan = plan_of(TINY, "layout.sharding=full", "layout.micro_batch=2")
    assert (plan.layout.sharding, plan.layout.micro_batch) == ("full", 2)
    decided = {each.field for each in plan.decisions}
    assert not decided & {"layout.sharding", "layout.micro_batch"}


def test_s0_5_precision_follows_the_accelerator():
    assert plan_of().precision == "bf16"
    assert plan_of(TINY, "train.precision=auto").precision == "fp32"
    assert plan_of(TINY, "train.precision=bf16").precision == "bf16"


@pytest.mark.parametrize("accelerator", ["V100-32", "T4"])
def test_s0_5_without_bf16_fp16_with_a_loss_scaler_is_taken(accelerator: str):
    plan = plan_of(JOB, f"cluster.accelerator={accelerator}", "model={preset: gpt2-large}")
    assert plan.precision == "fp16"
    (reason,) = (each.reason for each in plan.decisions if each.field == "train.precision")
    assert "loss scaler" in reason


def test_s0_5_bf16_on_an_accelerator_without_it_is_refused():
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
    problem = refused("train.global_batch=60", *ONLY_DATA)
    assert problem.code == "L001"
    assert "56 or 64" in problem.fix


def test_s0_4_nothing_fits_says_where_the_memory_goes_and_what_would_help():
    problem = refused(*TOO_LARGE)
    assert problem.code == "P001"
    assert "\n    optimizer " in problem.what
    assert "set cluster.nodes to" in problem.fix
    assert "or set cluster.accelerator to " in problem.fix


def test_this_machine_is_not_told_to_have_more_nodes():
    """`cluster.nodes: 2` is refused (T002) where the cluster is the machine itself."""
    job = job_of(JOB, *TOO_LARGE)
    here = replace(cluster_of(job), is_local=True)
    with pytest.raises(PlanError) as caught:
        make_plan(job, here, resolve_profile(job), resolve_decoder(job))
    (problem,) = caught.value.problems
    assert problem.code == "P001"
    assert "cluster.nodes" not in problem.fix


def test_no_other_engine_is_named_unless_its_files_run_the_job():
    job = job_of(JOB, *ONE_CARD, "engine=torchtitan")
    model = resolve_profile(job), resolve_decoder(job)
    with pytest.raises(PlanError) as caught:
        make_plan(job, cluster_of(job), *model, can_run=lambda plan, job: False)
    assert "engine" not in caught.value.problems[0].fix


def test_other_accelerators_are_those_that_a_node_has_as_many_of():
    """GB10 is a desktop machine of one, GB200 a node of 4: they had the least memory that does."""
    for model, engine in (("falcon-40b", "deepspeed"), ("llama-2-70b", "torchtitan")):
        words = (f"model.preset={model}", f"engine={engine}", "cluster.host_memory=300GiB")
        other = re.search(r"set cluster.accelerator to (\S+) \(", refused(*words).fix)[1]
        assert load_accelerators()[other].num_per_node == 8
        assert plan_of(JOB, *words, f"cluster.accelerator={other}").layout.num_ranks == 8


def test_nodes_of_one_card_are_no_desktop_machines():
    """13 nodes of an A100 were to be as many DGX Sparks."""
    nodes = ("cluster.accelerator=A100-40", "cluster.per_node=1", "cluster.nodes=13")
    job = ("model.preset=llama-2-70b", "train.global_batch=26", "engine=torchtitan")
    fix = refused(*nodes, *job, "cluster.host_memory=10GiB").fix
    assert "or set cluster.accelerator to " in fix
    assert "GB10" not in fix


def test_a_superchips_host_memory_is_its_own_and_not_a_share_of_a_dgx():
    job = ("model.preset=llama-2-13b", "cluster.per_node=1", "train.global_batch=8")
    plans = [
        plan_of(JOB, *job, "layout.offload=cpu", "cluster.accelerator=GH200", *host)
        for host in ((), ("cluster.host_memory=400GiB",))
    ]
    assert [plan.cluster.host_bytes for plan in plans] == [480 * 10**9, 400 * 2**30]
    assert [plan.cluster.known["host_bytes"] for plan in plans] == ["cited", "declared"]
    assert all(each.about != "host memory" for plan in plans for each in plan.cautions)


def test_the_accelerator_that_is_named_is_the_smallest_that_holds_the_job():
    problem = refused(*TOO_LARGE)
    other = re.search(r"set cluster.accelerator to (\S+) \(", problem.fix)[1]
    known, needed = load_accelerators(), load_accelerators()[other]
    smaller = {
        card.memory_bytes or 0: name
        for name, card in known.items()
        if card.backend == needed.backend and (card.memory_bytes or 0) < (needed.memory_bytes or 0)
    }
    assert refused(*TOO_LARGE, f"cluster.accelerator={smaller[max(smaller)]}").code == "P001"


def test_a_refusal_without_advice_says_the_memory_that_lacks_and_tries_no_change(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(infeasible, "ways_to_fit", lambda *asked: pytest.fail("a change was tried"))
    with pytest.raises(PlanError) as caught:
        plan_job(job_of(JOB, *TOO_LARGE), advise=False)
    (problem,) = caught.value.problems
    assert problem.code == "P001"
    assert problem.fix == "use accelerators with at least 274 GiB each, or a smaller model"


def test_shorter_samples_are_named_when_they_are_what_is_too_long():
    long = ("data.seq_len=131072", *ONLY_DATA, "layout.recompute=none", "layout.sharding=full")
    problem = refused(*long)
    assert problem.fix.startswith("leave layout.sharding and layout.tensor and layout.pipeline")
    local = refused_of(TINY, "cluster.memory=1GiB", "data.seq_len=1048576")
    shorter = int(local.fix.partition("set data.seq_len to ")[2].partition(":")[0])
    assert plan_of(TINY, "cluster.memory=1GiB", f"data.seq_len={shorter}").num_fitting


def test_a_fixed_choice_that_keeps_it_from_fitting_is_named_first():
    problem = refused("layout.sharding=none", "layout.tensor=1", "layout.pipeline=1")
    assert problem.fix.startswith("leave layout.sharding and layout.tensor")


def test_a_measured_block_counts_in_memory():
    costs = MeasuredCosts(num_parameters=1_000_000, forward_flops=None, saved_bytes=None)
    block = Block(name="own", count=4, hidden=0, measured=costs)
    assert dense_parameters(block) == block_parameters(block) == 1_000_000


def test_a_fault_that_cannot_fire_is_said():
    assert "rank=8@step=9 never fires" in reasons("drill.kill=[rank=8@step=9]")["drill.kill"]


def test_a_module_of_your_own_is_planned_with_unknown_time():
    job = job_of(TINY, "model={factory: 'm:f'}", "program=m:t")
    facts = ModuleFacts(num_parameters=4482)
    plan = make_plan(job, cluster_of(job), profile_module(facts))
    assert plan.estimate.step_s is None
    assert plan.layout.accumulation == 1
    assert "unknown" in format_plan(plan)
    assert plan.wall_s is None
    assert plan_from_json(plan_to_json(plan)) == plan


def test_what_only_a_program_can_use_is_named():
    given = ("train.optimizer=muon", "train.weight_decay=0.7", "train.compile=true")
    said = reasons("program=m:t", *given, text=TINY)
    read = "only m:t can use it, as session.job.spec.train"
    assert said["train.weight_decay"] == f"0.7: {read}.weight_decay"
    assert said["train.optimizer"] == (
        f"muon: memory and time are estimated with it; {read}.optimizer"
    )
    assert not said.keys() & {"train.compile", "train.betas"}  # used by the session; not given
    assert not reasons(*given, text=TINY).keys() & {"train.weight_decay", "train.optimizer"}


def test_a_model_that_every_rank_builds_whole_must_fit_in_the_nodes_memory():
    job = job_of(LARGE, "model={factory: 'm:f'}", "program=m:t", "engine=paceline")
    facts = ModuleFacts(num_parameters=80_000_000_000)
    assert not list(check_building(facts, job, cluster_of(job)))
    looks = replace(facts, whole_because="looks at a value that is drawn at random")
    (problem,) = check_building(looks, job, cluster_of(job))
    assert problem.code == "P004"
    assert "8 ranks of a node need 2.33 TiB and it has 2 TiB (assumed" in problem.what
    assert "because its factory looks at a value" in problem.what
    assert not list(check_building(replace(looks, num_parameters=10**10), job, cluster_of(job)))
    with pytest.raises(PlanError, match="whole in the host's memory"):
        plan_job(job, looks)


@pytest.mark.parametrize("text", [JOB, TINY])
def test_a_plan_reads_back_equal(text: str):
    plan = plan_of(text)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_plan_of_an_earlier_version_that_said_less_of_copies_is_read():
    plan = plan_of(JOB)
    earlier = plan_to_json(plan).replace(b'"outlives_node"', b'"not_known"')
    assert earlier != plan_to_json(plan)
    assert plan_from_json(earlier).layout == plan.layout


def test_the_screen_is_short_and_shows_the_equation():
    for text in (JOB, TINY):
        screen = format_plan(plan_of(text))
        assert len(screen.splitlines()) <= 54
        assert "tokens a step" in screen
        assert "estimated" in screen


def test_the_parts_of_memory_are_said_to_be_where_they_are():
    plan = plan_of()
    assert "(parts: --explain)" in format_plan(plan)
    assert "(parts: below)" in format_plan(plan, explained=True)


def test_a_replica_of_one_node_says_which_failures_it_serves_and_what_the_others_need():
    shown = " ".join(format_plan(plan_of(TINY)).split())
    assert "covers 12.9% of failures (a process ends, its node stays up)" in shown
    assert "; others: resume from the checkpoint" in shown


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
    (tmp_path / "x").write_bytes(b"a" * 10_000)
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
    assert "paceline catalog models" in result.output
    assert "H100-SXM" in result.output


def test_run_does_every_layout_that_is_planned_for_this_machine():
    plan = plan_of(TINY)
    assert {"none", "full", "zero1"} <= {each.layout.sharding for each in (plan, *plan.rejected)}
    for each in (plan, *plan.rejected):
        assert not list(check_runs_here(job_of(TINY), replace(plan, layout=each.layout)))
    assert plan_of(TINY, "layout.tensor=2").layout.tensor == 2


def test_run_refuses_what_it_cannot_do():
    problem = refused_of(TINY, "layout.offload=nvme", "layout.sharding=full")
    assert problem.code == "L012"
    assert "Paceline's own runtime cannot do" in problem.what


def test_a_classifiers_plan_has_logits_of_its_labels(tmp_path: Path):
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 50000}
    llama |= {"num_attention_heads": 4, "intermediate_size": 128, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    text = (
        "model: {hf_config: config.json, tokenizer: t}\n"
        "data: {path: x.jsonl, seq_len: 32}\ntrain: {global_batch: 8, steps: 2}\n"
        "cluster: {accelerator: cpu, per_node: 2}\nlayout: {micro_batch: 4}\n"
    )
    classes = ("data.kind=classification", "data.labels=[a, b]")
    plain, classifier = (
        plan_job(parse_job(text, source="job.yaml", folder=tmp_path, overrides=each))
        for each in ((), classes)
    )
    assert classifier.profile.num_parameters == plain.profile.num_parameters + 2 * 64
    activations = [each.estimate.memory.parts["activations"] or 0 for each in (plain, classifier)]
    assert activations[0] - activations[1] > 4 * 32 * 8 * 50000


@pytest.mark.parametrize("split", ["tensor", "pipeline", "context"])
def test_a_classifier_is_split_over_data_ranks_alone(split: str, tmp_path: Path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = (
        "model: {hf_config: config.json, tokenizer: t}\n"
        "data: {path: x.jsonl, kind: classification, labels: [a, b], seq_len: 32}\n"
        "train: {global_batch: 8, steps: 2}\ncluster: {accelerator: cpu, per_node: 2}\n"
        f"layout: {{{split}: 2}}\n"
    )
    with pytest.raises(PlanError) as caught:
        plan_job(parse_job(text, source="job.yaml", folder=tmp_path))
    (problem,) = caught.value.problems
    assert problem.code == "L012"
    assert f"layout.{split} is 2, which data.kind classification does not go with" in problem.what
    assert f"leave layout.{split} out" in problem.fix
    assert "engine" not in problem.fix


@pytest.mark.parametrize(
    ("model", "accelerator"), [("llama-3-8b", "A100-80"), ("llama-3-70b", "H100-SXM")]
)
def test_other_engines_are_planned_with_what_they_have(model: str, accelerator: str):
    common = (f"model.preset={model}", f"cluster.accelerator={accelerator}", "cluster.nodes=4")
    for engine, has in (
        ("megatron", {"none", "zero1"}),
        ("fsdp1", {"none", "zero2", "full", "hybrid"}),
    ):
        plan = plan_of(JOB, f"engine={engine}", *common)
        assert {each.layout.sharding for each in (plan, *plan.rejected)} <= has
        assert plan.layout.schedule in ("1f1b", "interleaved")
        assert engine != "fsdp1" or plan.layout.pipeline == plan.layout.tensor == 1


def test_the_fewest_ranks_that_fit_are_found():
    text = "plan.objective=ranks"
    plan = plan_of(JOB, "cluster.nodes=4", text, "layout.offload=none")
    fewer = plan.cluster.num_ranks // 2
    assert 1 < plan.cluster.num_ranks <= 8
    refused("layout.offload=none", f"cluster.per_node={fewer}")


def test_a_deadline_asks_for_more_ranks():
    few = plan_of(JOB, "cluster.nodes=4", "plan.objective=ranks")
    assert few.wall_s is not None
    more = plan_of(
        JOB, "cluster.nodes=4", "plan.objective=ranks", f"plan.deadline={few.wall_s / 2:.0f}s"
    )
    assert more.cluster.num_ranks > few.cluster.num_ranks
    assert more.wall_s is not None
    assert more.wall_s <= few.wall_s / 2


def test_a_deadline_that_no_number_of_ranks_keeps_is_refused():
    problem = refused("plan.objective=ranks", "plan.deadline=1s")
    assert problem.code == "P002"
    assert "over the deadline of 1 s" in problem.what


def test_a_deadline_that_is_missed_by_little_is_named_with_what_tells_the_two_apart():
    limit = Limit(name="deadline", limit=4500, expected=4543.0)
    plan = replace(plan_of(), wall_s=4543.0, limits=(limit,))
    missed = limit_problem(job_of(), plan, limit)
    assert "needs 1h 15m 43s, over the deadline of 1h 15m 00s" in missed.what
    assert "run         1h 15m 43s; goodput" in format_plan(plan)
    assert "OVER        the deadline of 1h 15m 00s" in format_plan(plan)


def test_the_cheapest_run_costs_no_more_than_the_shortest():
    short, cheap = (
        plan_of(JOB, "cluster.nodes=2", f"plan.objective={o}") for o in ("time", "cost")
    )
    assert short.cost is not None
    assert cheap.cost is not None
    assert cheap.cost.usd <= short.cost.usd


def test_a_provider_without_a_price_is_refused_by_name():
    problem = refused("plan.provider=nobody")
    assert problem.code == "P003"
    assert "name one of" in problem.fix


def test_the_front_has_nothing_that_another_beats():
    points = plan_of().pareto
    assert len(points) > 2
    seconds, sizes = [p.step_s or 0 for p in points], [p.memory_bytes for p in points]
    assert seconds == sorted(seconds)
    assert sizes == sorted(sizes, reverse=True)


def test_every_stage_has_its_memory_and_the_fullest_is_the_estimate():
    plan = plan_of(JOB, "layout.pipeline=4")
    assert len(plan.stages) == 4
    assert max(s.known_bytes for s in plan.stages) == plan.estimate.memory.known_bytes


def test_runners_up_are_different_ways_to_split_and_lose_by_named_terms():
    plan = plan_of(JOB, "cluster.nodes=2", "plan.simpler_margin=0")
    ways = [
        (e.layout.tensor, e.layout.pipeline, e.layout.context, e.layout.sharding)
        for e in plan.rejected
    ]
    assert len(ways) == len(set(ways))
    slower = [each for each in plan.rejected if "slower" in each.reason]
    assert slower
    assert any("+" in each.reason for each in slower)


@pytest.mark.parametrize("nodes", [4, 8])
def test_the_sharding_is_compared_with_the_best_of_another_one(nodes: int):
    text = JOB.replace("global_batch: 64", "global_batch: 512")
    text = text.replace("llama-3-8b", "gpt2-large").replace("4096", "1024")
    plan = plan_of(text, f"cluster.nodes={nodes}", "layout.chunks=2", "engine=megatron")
    (reason,) = (each.reason for each in plan.decisions if each.field == "layout.sharding")
    found = re.search(
        r"(?:than|fits;) (.*?),? (?:which )?is (?:estimated )?([0-9.]+)% (\w+)", reason
    )
    assert found is not None, reason
    kind = next(e.layout.sharding for e in plan.rejected if e.layout.name == found[1])
    same = [each for each in plan.rejected if each.layout.sharding == kind]
    best = min(each.estimate.step_s / plan.estimate.step_s - 1 for each in same)
    said = float(found[2]) * (1 if found[3] == "slower" else -1)
    assert said <= 100 * best + 0.1


def test_a_runner_up_is_named_with_its_context_ranks_and_in_the_engines_words():
    chosen = Layout(data=8, sharding="full", micro_batch=1, accumulation=8)
    other = replace(chosen, data=1, context=4, tensor=2)
    assert _short(other, chosen, "FSDP2") == "context parallel 4 (ring) x tensor 2, FSDP2"
    assert _short(other, chosen, "ZeRO-3").endswith(" x tensor 2, ZeRO-3")
    wide = replace(chosen, micro_batch=2, accumulation=4)
    assert _short(wide, chosen, "FSDP2") == "FSDP2 over 8 ranks, micro-batch 2"
    plan = plan_of(JOB, "engine=deepspeed", "layout.sharding=full")
    assert format_plan(plan).startswith("layout      ZeRO-3 over 8 ranks")


def test_the_useful_flops_of_frozen_weights_are_two_passes():
    assert ": 3 x forward FLOPs (causal" in " ".join(explain_plan(plan_of(JOB)).split())
    text = explain_plan(plan_of(JOB, "train.adapter={kind: lora, rank: 16, targets: all}"))
    assert re.search(
        r": 2\.\d+ x forward FLOPs, as some weights are frozen \(", " ".join(text.split())
    )


def test_no_two_runners_up_on_the_screen_have_the_same_name():
    for nodes in (1, 4, 16):
        plan = plan_of(
            JOB.replace("global_batch: 64", "global_batch: 512"), f"cluster.nodes={nodes}"
        )
        names = [_short(each.layout, plan.layout, "FSDP2") for each in plan.rejected]
        assert len(names) == len(set(names))
        assert max(map(len, format_plan(plan).splitlines())) <= 100


def test_one_copy_of_every_part_is_said_only_where_data_and_context_are_1():
    said = "data and context are 1"
    alone = reasons("layout.data=1", "layout.context=1")
    assert said in alone["layout.sharding"]
    assert said not in reasons()["layout.sharding"]


def test_a_memory_without_its_unit_is_what_is_to_mend():
    fix = refused('cluster.memory="1 KB"').fix
    assert fix.startswith("cluster.memory is 1000 B a rank, less than")
    assert ";" not in fix


def test_too_much_head_room_is_lowered_first():
    fix = refused("plan.head_room=0.99").fix
    assert fix.startswith("set plan.head_room to 0.1: ")


def test_a_micro_batch_of_3_names_its_neighbours_that_work():
    problem = refused("layout.micro_batch=3")
    assert "set layout.micro_batch to 2 or 4" in problem.fix
    for size in (2, 4):
        plan_of(JOB, f"layout.micro_batch={size}")


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_a_budget_that_is_not_kept_says_what_it_pays_for(objective: str):
    job = job_of(JOB, "plan.budget=10", f"plan.objective={objective}")
    if objective == "cost":
        fix = refused("plan.budget=10", "plan.objective=cost").fix
    else:
        plan = plan_of(JOB, "plan.budget=10")
        fix = limit_problem(job, plan, plan.limits[0]).fix
        steps = int(re.search(r"set train.steps to (\d+)", fix)[1])
        assert plan_of(JOB, "plan.budget=10", f"train.steps={steps}").limits[0].is_kept
    assert fix.startswith("raise plan.budget to ")
    assert ("plan.objective=cost" in fix) is (objective == "time")


def test_the_three_cheapest_providers_are_there_on_demand_and_spot():
    plan = plan_of()
    ways = [cost.way for cost in plan.costs]
    assert ways.count("on demand") == 3
    assert 1 <= ways.count("spot") <= 3
    demand = [cost for cost in plan.costs if cost.way == "on demand"]
    assert plan.cost == min(demand, key=lambda cost: (not cost.runs_as_planned, cost.usd))


def test_a_machine_with_too_little_host_memory_is_no_price_of_a_plan():
    choices = {
        "model.preset": "llama-3-70b",
        "cluster.accelerator": "H100-SXM",
        "cluster.nodes": 8,
        "cluster.per_node": 8,
        "train.global_batch": 128,
        "engine": "megatron",
    }
    plan = plan_of(JOB, *(f"{key}={value}" for key, value in choices.items()))
    assert plan.cost is not None
    assert plan.cost.runs_as_planned
    assert f"{plan.cost.num_instances} x {plan.cost.instance}" in explain_plan(plan)
    # A VM of 128 GB at cudo was the cheapest; its host does not hold a node's part of the state.
    assert all("8x64v128gb" not in cost.instance for cost in plan.costs)


def test_small_amounts_have_two_digits():
    assert [format_amount(each) for each in (0.4567, 9.96, 53230.2)] == ["0.46", "10", "53,230"]


OF_70B = ("model.preset=llama-3-70b", "train.global_batch=128")


def test_a_layout_that_lost_names_what_it_costs_more_and_what_it_saves():
    plan = plan_of(LARGE, *OF_70B)
    signs = ["".join(re.findall(r" ([+-])[\d.]+ m?s", each.reason)) for each in plan.rejected]
    assert any({"+", "-"} <= set(each) for each in signs)
    # The others are added up behind them, whatever their sign.
    assert all(re.fullmatch(r"\+*-*[+-]?", each) for each in signs)


def test_the_least_sharding_names_the_degrees_that_it_is_compared_at():
    (why,) = [
        each.reason for each in plan_of(LARGE, *OF_70B).decisions if each.field == "layout.sharding"
    ]
    assert re.match(r"the least sharding that fits with tensor \d( x \w+ \d)*: DDP needs", why)


def test_s1_9_the_lowest_zero_stage_that_fits_is_named_with_what_it_costs():
    """Only the next lower stage was compared: that DDP fits as well, nothing said."""
    ways = ("tensor", "pipeline", "context")
    plan = plan_of(
        JOB.replace("per_node: 8", "per_node: 8, nodes: 4, network: 400Gb/s InfiniBand"),
        *("model.preset=tinyllama-1.1b", "engine=deepspeed", "train.global_batch=256"),
        *("data.seq_len=2048", *(f"layout.{way}=1" for way in ways)),
    )
    assert plan.layout.sharding == "full"
    (why,) = [each.reason for each in plan.decisions if each.field == "layout.sharding"]
    least = re.search(r"; the least sharding that fits, DDP over 32 ranks.*, is \d+% slower$", why)
    assert least, why
    assert least[0] in " ".join(format_plan(plan).split())


def test_explain_lists_the_cheapest_providers_on_demand_and_spot():
    text = explain_plan(plan_of())
    assert "cost of a run with its failures, the cheapest on demand and spot" in text
    assert re.search(
        r"at \$[\d.]+ an hour each, \$[\d.]+ for storage and egress; price", " ".join(text.split())
    )
    assert "on demand  $" in text
    assert "spot       $" in text


def test_adapters_wider_than_the_model_are_refused():
    with pytest.raises(JobError, match=r"rank is 100000.*4096 wide"):
        plan_of(JOB, "train.adapter={kind: lora, rank: 100000}")


def test_a_section_that_only_set_has_is_found_there():
    with pytest.raises(JobError) as raised:
        job_of(JOB, "foo.bar=3")
    assert raised.value.problems[0].where == "foo, --set"


def test_adapters_that_do_not_fit_are_offered_in_4_bits():
    text = JOB.replace("llama-3-8b", "llama-3-70b").replace("per_node: 8", "per_node: 1")
    given = ("data.seq_len=256", "engine=megatron")
    fix = refused_of(text, "train.adapter={kind: lora}", *given).fix
    assert fix.startswith("set train.adapter.kind to qlora")
    plan_of(text, "train.adapter={kind: qlora}", *given)


LARGE = """\
model: {preset: llama-3-405b}
data: {path: x, seq_len: 8192}
cluster: {accelerator: H100-SXM, nodes: 8}
train: {global_batch: 2048, steps: 1000}
engine: megatron
"""


def test_an_offloaded_optimizer_is_said_with_what_a_node_holds():
    plan = plan_of(LARGE)
    assert plan.layout.offload == "cpu"
    # 64 ranks share 405 B parameters' moments and master copies: 12 bytes each, 1/8 a node.
    assert plan.host_bytes == pytest.approx(405.85e9 * 12 / 8, rel=0.2)
    screen = format_plan(plan)
    assert ", optimizer offloaded (in host memory, " in " ".join(screen.split())
    assert "the ranks of a node, of 2 TiB (assumed: 256 GiB for each accelerator)" in screen
    assert max(map(len, screen.splitlines())) <= 100
    assert plan_from_json(plan_to_json(plan)) == plan


SLOW_LINKS = (
    "model.preset=llama-3-70b",
    "data.seq_len=8192",
    "cluster.accelerator=RTX-4090",
    "cluster.nodes=8",
    "train.global_batch=128",
)


def test_s0_4_offloading_is_looked_at_where_the_fastest_layout_without_mostly_sends():
    """Full sharding over 64 ranks fits, and gathers 141 GB for each of 16 micro-batches over
    10 Gb/s: offloading was not searched, and is forty times as fast."""
    plan = plan_of(JOB, *SLOW_LINKS)
    alone = plan_of(JOB, *SLOW_LINKS, "layout.offload=none")
    assert plan.layout.offload == "cpu"
    assert plan.estimate.step_s < alone.estimate.step_s / 10
    told = {each.field: each.reason for each in plan.decisions}["layout.offload"]
    assert told.startswith(f"the fastest without offload, {alone.layout_name}, takes ")
    listed = [row for row in plan.rejected if row.layout.offload != "none"]
    assert listed
    (first, _), *_ = fastest_layouts(job_of(JOB, *SLOW_LINKS), None, 1)
    assert first.offload == "cpu"
    # Where the links are fast, what fits on the accelerators stays there.
    assert plan_of(JOB, *SLOW_LINKS[:2], "cluster.nodes=8").layout.offload == "none"


ONE_CARD = ("model.preset=llama-2-7b", "cluster.accelerator=RTX-4090", "cluster.per_node=1")


def test_where_nothing_fits_an_engine_with_which_it_does_is_named_with_its_time():
    """More nodes and another accelerator were all that was named; DeepSpeed's ZeRO-3 offloads on
    one rank, and plans the same job."""
    fix = refused(*ONE_CARD, "engine=torchtitan").fix
    plan = plan_of(JOB, *ONE_CARD, "engine=deepspeed")
    seconds = format_seconds(plan.estimate.step_s)
    named = f"{plan.layout_name}, optimizer on cpu, fits ({seconds} a step, estimated)"
    assert fix.startswith(f"set engine to deepspeed: {named}; or set cluster.nodes to")
    # What the host does not hold its disk may.
    larger = refused(*ONE_CARD, "model.preset=falcon-40b").fix
    assert larger.startswith("set engine to deepspeed and layout.offload_path to a folder on each")
    # Gradients of 70B, 276 GB beside a disk, are more than the 256 GiB of memory.
    assert "offload_path" not in refused(*ONE_CARD, "model.preset=llama-2-70b").fix
    disk = ("engine=deepspeed", "layout.offload=nvme", "layout.offload_path=/local")
    what = refused_of(JOB, *ONE_CARD, "model.preset=llama-2-70b", *disk).what
    assert "a node needs at least 276 GiB of memory, for gradients and buffers, and has 256" in what
    # An adapter only our own runtime trains, and an accelerator none of them does.
    lora = ("model.preset=llama-3-405b", "train.adapter={kind: lora, rank: 8}")
    assert "engine" not in refused(*ONE_CARD, *lora).fix
    assert "engine" not in refused(*lora[:1], *ONE_CARD[2:], "cluster.accelerator=TPU-v5e").fix


@pytest.mark.parametrize(
    ("accelerator", "sharding", "reason"),
    [
        ("RTX-4090", "full", "the least sharding that fits"),
        ("A100-40", "zero2", "the least sharding that fits"),
        ("A100-80", "zero1", "fits; ZeRO-2 over 1 rank"),
    ],
)
def test_s0_4_on_one_card_parameters_and_optimizer_are_offloaded_where_nothing_fits_without(
    accelerator: str, sharding: str, reason: str, tmp_path: Path
):
    """P001 named other engines and more cards. The more a card holds, the less is copied."""
    one = ("cluster.per_node=1", f"cluster.accelerator={accelerator}", "train.global_batch=32")
    plan = plan_of(JOB, *one)
    assert (plan.layout.offload, plan.layout.offload_parameters) == ("cpu", True)
    assert (plan.layout.num_ranks, plan.layout.sharding) == (1, sharding)
    why = {each.field: each.reason for each in plan.decisions}
    assert why["layout.offload"].startswith("no layout fits on the accelerators alone")
    # In float32: 8.03 B parameters, their gradients and two moments.
    assert plan.host_bytes == pytest.approx(16 * 8.03e9, rel=0.01)
    assert plan.estimate.memory.parts["parameters"] == 0
    large = of_memory(tmp_path, accelerator, "900 GiB")
    whole = plan_of(JOB, *one, large, "layout.micro_batch=32", "layout.offload=cpu")
    assert whole.host_bytes == plan.host_bytes
    printed = " ".join(format_plan(plan).split())
    assert f"why no layout fits on the accelerators alone. With offload: {reason}" in printed
    assert ("from the host once a step" in printed) is (sharding != "full")
    problem = refused(*one, "layout.offload=none")
    assert problem.fix.startswith("leave layout.offload at auto: ")


def of_memory(folder: Path, accelerator: str, memory: str) -> str:
    """A card of a catalog file of one's own, like another but for its memory."""
    path = folder / "large.toml"
    path.write_text(f'[accelerators.{accelerator}]\nmemory_bytes = "{memory}"\n')
    return f"cluster.catalog={path}"


def test_s0_4_what_is_copied_between_host_and_card_is_counted_each_time_that_it_crosses(
    tmp_path: Path,
):
    """8.03 B parameters go there in float32 and their gradients come back, at 80 % of 31.5 GB/s;
    ZeRO-2's gradients do so after each of 16 micro-batches, and are added on the host."""
    one = ("cluster.per_node=1", "train.global_batch=32", "layout.micro_batch=2")
    fixed = (*one, "cluster.accelerator=A100-40", "layout.offload=cpu", "layout.recompute=full")
    copies, large = {}, of_memory(tmp_path, "A100-40", "400 GiB")
    for sharding in ("zero1", "zero2", "full"):
        space = ("plan.head_room=0", large, f"layout.sharding={sharding}")
        copies[sharding] = plan_of(JOB, *fixed, *space).estimate.terms["data"]
    assert copies["zero1"] < copies["zero2"] < copies["full"]
    once_s = 4 * 8.03e9 / (0.8 * 31.5e9)
    assert copies["zero1"] < 2 * once_s
    assert copies["zero2"] < 17 * once_s
    # Frozen weights have no gradients, and stay in the type that they are multiplied in.
    lora = (*fixed, "train.adapter={kind: lora, rank: 8}", "layout.sharding=full")
    plan = plan_of(JOB, *lora)
    assert plan.host_bytes < 2.1 * 8.03e9
    assert plan.estimate.terms["data"] < copies["full"] / 2


def test_offloading_and_checkpoints_take_the_time_of_the_card_s_own_host_link():
    def seconds(accelerator: str) -> tuple[float, float]:
        where = f"cluster.accelerator={accelerator}"
        sets = ("cluster.per_node=1", "layout.offload=cpu", "engine=deepspeed")
        text = JOB.replace("llama-3-8b", "tiny").replace("4096", "512")
        job = job_of(text, where, *sets)
        plan = plan_of(text, where, *sets)
        view = outlook(plan, job)
        return plan.estimate.terms["optimizer"], view.save_s - view.write_s

    (old_s, old_save_s), (new_s, new_save_s) = seconds("V100-32"), seconds("GH200")
    assert old_save_s == pytest.approx(new_save_s * 450 / 15.75)
    assert old_s > 1.5 * new_s  # the host's cores take as long


def test_a_declared_network_and_memory_are_shown_beside_what_the_catalog_has():
    network = "cluster.network=100Gb/s Ethernet"
    plan = plan_of(JOB, "cluster.nodes=2", network, "cluster.memory=80 GiB")
    told = {each.field: each.reason for each in plan.decisions}
    assert "latency is ethernet-100's, without RDMA" in told["cluster.network"]
    assert told["cluster.memory"] == "as declared; the catalog's H100-SXM has 79.6 GiB"
    usual = {each.field for each in plan_of(JOB, "cluster.memory=70 GiB").decisions}
    assert "cluster.memory" not in usual


def test_what_the_hosts_cannot_hold_does_not_fit():
    what = refused_of(LARGE, "cluster.nodes=1").what
    assert "a node needs 4.43 TiB of host memory and has 2 TiB (assumed" in what
    problem = refused_of(LARGE, "cluster.nodes=2", "layout.offload=cpu")
    assert problem.code == "P004"
    assert "2.21 TiB there and has 2 TiB" in problem.what


def test_a_limit_that_fails_exits_with_3_only_when_asked(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    arguments = [str(tmp_path / "job.yaml"), "--budget", "1"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0
    assert "OVER        the budget of $1" in done.output
    kept = CliRunner().invoke(command, [*arguments[:1], "--budget", "20000", "--deadline", "9d"])
    assert "within      the budget of $20,000 and the deadline of 9d 00h" in kept.output
    failed = CliRunner().invoke(command, [*arguments, "--fail-on", "budget"])
    assert isinstance(failed.exception, PlanError)


@pytest.mark.parametrize("limit", ["--budget", "--deadline"])
def test_a_limit_that_fails_exits_with_3_with_phases_too(limit: str, tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    arguments = [str(tmp_path / "job.yaml"), "--phases", limit, "1", "--fail-on", limit[2:]]
    failed = CliRunner().invoke(command, arguments)
    assert isinstance(failed.exception, PlanError)
    assert failed.exception.exit_code == 3
    unknown = CliRunner().invoke(command, [str(tmp_path / "job.yaml"), "--fail-on", limit[2:]])
    assert f"needs {limit}" in unknown.output


@pytest.mark.parametrize("flag", [["--explain"], ["--md"], ["--all", "3"], ["--contract", "002"]])
def test_the_other_ways_to_print_a_plan(flag: list[str], tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    done = CliRunner().invoke(command, [str(tmp_path / "job.yaml"), *flag])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) > 3


def test_s1_8_no_two_layouts_of_the_list_have_the_same_words():
    job = Path(__file__).parents[2] / "examples/plan-70b/job.yaml"
    done = CliRunner().invoke(command, [str(job), "--all", "40", "--set", "layout.context=2"])
    assert done.exit_code == 0, done.output
    names = [re.split(r"  +", line)[:3] for line in done.output.splitlines()[1:]]
    assert len(names) == len({tuple(name) for name in names}) == 40


def test_experts_without_a_balancing_loss_are_warned_of():
    moe = ("model={hf_config: mixtral-8x7b}", "layout.sharding=full", "cluster.nodes=8")
    assert "train.router_loss adds" in reasons(*moe)["balancing loss"]
    assert "balancing loss" not in reasons()


def test_a_pipeline_is_refused_where_only_some_kinds_of_blocks_have_adapters(tmp_path: Path):
    config = {"model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = (
        "model: {hf_config: config.json}\ndata: {path: x, seq_len: 32}\n"
        "train: {global_batch: 8, steps: 2, adapter: {targets: %s}}\n"
        "cluster: {accelerator: cpu, per_node: 2}\nlayout: {%s}\n"
    )

    def layout_with(targets: str, layout: str) -> Layout:
        job = parse_job(text % (targets, layout), source="job.yaml", folder=tmp_path)
        return plan_job(job).layout

    for split in ("pipeline: 2", "schedule: interleaved"):
        with pytest.raises(PlanError) as caught:
            layout_with("[gate, up, down]", split)
        (problem,) = caught.value.problems
        assert problem.code == "L012"
        assert "which train.adapter.targets does not go with" in problem.what
        assert "leave layout." in problem.fix
    assert layout_with("attention", "pipeline: 2").pipeline == 2
    assert layout_with("[gate, up, down]", "").pipeline == 1


def test_of_layouts_as_fast_the_one_with_the_fewest_context_ranks_is_chosen():
    changes = ("model.preset=llama-3-405b", "data.seq_len=8192", "engine=megatron")
    plan = plan_of(JOB, *changes, "cluster.nodes=2048", "train.global_batch=2048")
    assert (plan.layout.tensor, plan.layout.context, plan.layout.pipeline) == (8, 2, 16)
    fastest = min(each.estimate.step_high_s or 0 for each in plan.rejected)
    assert (plan.estimate.step_high_s or 0) <= 1.05 * fastest


def test_bytes_with_an_engine_whose_peaks_were_never_compared_are_a_range():
    memory = plan_of(JOB, "engine=torchtitan").estimate.memory
    assert (memory.low_bytes, memory.high_bytes) == (
        round(0.85 * memory.known_bytes),
        round(1.5 * memory.known_bytes),
    )
    assert "no peak of a run with torchtitan 0.3.0 was compared" in format_plan(
        plan_of(JOB, "engine=torchtitan")
    )
    for engine in ("paceline", "megatron", "megatron-bridge", "deepspeed", "accelerate"):
        plan = plan_of(JOB, f"engine={engine}", "layout.micro_batch=1")
        assert plan.estimate.memory.high_bytes is None


def test_s3_13_100b_parameters_on_64_a100_have_the_same_plan_every_time():
    """Document 003's example: 100B parameters, fully sharded, recomputed and offloaded."""
    decoder = "{layers: 80, hidden: 10240, heads: 80, kv_heads: 80, ffn: 27392, vocab: 32000}"
    text = JOB.replace("{preset: llama-3-8b}", f"{{decoder: {decoder}}}")
    fixed = ("cluster.accelerator=A100-80", "cluster.nodes=8", "layout.sharding=full")
    asked = (*fixed, "layout.recompute=full", "layout.offload=cpu", "layout.pipeline=1")
    first, again = (plan_of(text, *asked) for _ in range(2))
    assert first.profile.num_parameters == pytest.approx(100e9, rel=0.02)
    assert first.layout.num_ranks == 64
    assert first.estimate.memory.known_bytes <= first.limit_bytes
    assert first.layout.recompute == "full"
    assert first.host_bytes > 0
    assert plan_to_json(first) == plan_to_json(again)


def test_s1_5_recompute_costs_flops_and_the_blocks_that_it_passes_over_are_said():
    fixed = ("layout.sharding=full", "layout.micro_batch=1", "train.global_batch=512")
    every = {
        kind: plan_of(JOB, *fixed, f"layout.recompute={kind}", "layout.recompute_every=1")
        for kind in ("none", "full")
    }
    selective = plan_of(JOB, *fixed, "layout.recompute=selective")
    kept = [
        each.estimate.memory.parts["activations"]
        for each in (every["none"], selective, every["full"])
    ]
    assert kept == sorted(kept, reverse=True)
    assert (
        every["full"].estimate.hfu
        > every["full"].estimate.mfu
        == pytest.approx(every["none"].estimate.mfu, rel=0.35)
    )
    asked = plan_of(JOB, *fixed, "layout.recompute=full")
    assert asked.layout == every["full"].layout
    assert ", full recompute\n" in format_plan(asked)
    some = plan_of(JOB, *fixed, "layout.recompute_every=4")
    assert ", full recompute every 4 blocks\n" in format_plan(some)


BACKWARD = ("engine=torchtune", "train.optimizer_in_backward=true")


def test_an_optimizer_that_steps_in_the_backward_pass_holds_no_gradients():
    asked = (*BACKWARD, "train.clip_norm=null")
    plan = plan_of(JOB, *asked)
    assert plan.estimate.memory.parts["gradients"] == 0
    assert plan.layout.accumulation == 1
    usual = plan_of(JOB, BACKWARD[0], "layout.micro_batch=1")
    assert usual.estimate.memory.parts["gradients"] > 0
    assert usual.layout.accumulation > 1
    assert case_of_plan(plan).engine.gradient_bytes == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (BACKWARD, "train.clip_norm is 1 and train.optimizer_in_backward true"),
        ((*BACKWARD, "engine=deepspeed"), "deepspeed cannot be asked for it"),
        ((BACKWARD[1],), "paceline cannot be asked for it"),
        (
            (*BACKWARD, "train.clip_norm=null", "train.adapter.kind=lora"),
            "torchtune cannot be asked for it",
        ),
    ],
)
def test_an_optimizer_in_the_backward_pass_is_refused_where_the_recipe_ends_with_it(
    changes, message
):
    assert message in refused_of(JOB, *changes).what
