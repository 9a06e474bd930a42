"""A plan in sixteen phases with gates between them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contracts.phase_forms import FORMS

from paceline.contracts.phases import PHASES, Goals, PhasePlan, exit_code, make_phases
from paceline.contracts.phases.document import GROUPS
from paceline.contracts.writing import format_contract
from paceline.errors import PacelineError, PlanError
from paceline.estimate.schedule import bubble_share
from paceline.job import Job, parse_job
from paceline.plan import Plan, plan_job
from paceline.record.metrics import StepMetrics
from paceline.units import format_bytes, format_seconds

JOB = """\
name: try
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
train: {global_batch: 128, steps: 10000}
"""
TOO_LARGE = ("model.preset=llama-3-405b", "cluster.accelerator=L4", "cluster.nodes=1")
ONE_T4 = ("cluster.accelerator=T4", "cluster.nodes=1", "cluster.per_node=1")
"""The leanest plan of a larger T4 offloads optimizer state and parameters."""

A100 = ("cluster.accelerator=A100-80", "train.steps=1000")
"""Fewer nodes cost less than half: another provider has the single node."""

SMALL = ("model.preset=gpt2", "data.seq_len=512")
_PHASES: dict[tuple[str, ...], PhasePlan] = {}
_PLANS: dict[tuple[str, bool], Plan | PacelineError] = {}


def job_of(*overrides: str) -> Job:
    return parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def replan(job: Job, *, advise: bool = True) -> Plan:
    """`plan_job`, once for each job: phases of many tests ask for the same ones."""
    key = (repr(job), advise)
    if key not in _PLANS:
        try:
            _PLANS[key] = plan_job(job, advise=advise)
        except PacelineError as error:
            _PLANS[key] = error
    if isinstance(found := _PLANS[key], PacelineError):
        raise found
    return found


def phased(*overrides: str, **options: Any) -> PhasePlan:
    if options:
        return make_phases(job_of(*overrides), replan, **options)
    if overrides not in _PHASES:
        _PHASES[overrides] = make_phases(job_of(*overrides), replan)
    return _PHASES[overrides]


def output(number: int, *overrides: str) -> dict[str, Any]:
    (phase,) = [each for each in phased(*overrides).phases if each.number == number]
    return dict(phase.output)


def gate(found: PhasePlan, phase: int) -> Any:
    return next(each for each in found.gates if each.phase == phase)


@pytest.mark.parametrize("number", list(PHASES))
def test_every_phase_is_of_the_form_that_it_promises(number: int):
    found = json.loads(json.dumps(output(number)))
    checked = msgspec.convert(found, type=FORMS[number], strict=True)
    assert checked == found, "the form knows every field, however deep"


def test_the_stages_are_those_that_a_run_has():
    """The last of four has a head as slow as five blocks, and none of its own."""
    model = "model={decoder: {layers: 16, hidden: 2048, heads: 16, vocab: 128000}}"
    given = (model, "layout.pipeline=4", "layout.schedule=1f1b")
    stages = output(2, *given)["pipelineStageSuggestions"]
    assert [each["blocks"] for each in stages] == ["0-4", "5-9", "10-15", ""]
    assert [each["holds"] for each in stages][::3] == [
        "blocks, embedding",
        "output matrix and loss",
    ]
    assert output(2, *given)["partitionPoints"] == [5, 10, 16]


def test_the_files_have_the_names_of_the_process():
    files = phased().files
    for name in (
        "phase1-resource-assessment.json",
        "phase11-hyperparameters.json",
        "final-training-plan.json",
        "final-training-plan.md",
        "launch-script.sh",
        "job.yaml",
    ):
        assert name in files
    assert len([name for name in files if name.startswith("phase") and name[5].isdigit()]) == 16


def test_the_final_object_has_eleven_groups_and_metadata():
    final = json.loads(phased().files["final-training-plan.json"])
    assert len(GROUPS) == 11
    assert set(final) == {*GROUPS, "metadata", "gates", "success"}
    assert set(final["metadata"]) == {"processId", "timestamp", "version"}


def test_the_same_input_makes_the_same_bytes():
    again = make_phases(job_of(), plan_job)
    assert again.files == phased().files


def test_a_phase_alone_is_the_same_as_among_all():
    alone = phased(only=7)
    (phase,) = alone.phases
    assert phase.output == output(7)
    assert set(alone.files) == {"phase7-memory-optimization.json", "phases.json"}


def test_a_phase_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no phase 17; they are 1 to 16"):
        phased(only=17)


def test_a_folder_is_gone_on_with_and_changed_input_is_made_again():
    index = phased().files["phases.json"]
    assert len(phased(index=index).kept) == 16
    assert phased("train.steps=20000", index=index).kept == ()
    assert phased(index="not json").kept == ()


def test_the_phases_agree_with_the_plan():
    plan = plan_job(job_of())
    layout = plan.layout
    batch = output(11)
    product = batch["microBatchSize"] * batch["gradientAccumulationSteps"]
    assert product * batch["dataParallelSize"] == batch["globalBatchSize"] == 128
    assert output(3)["hybridConfig"]["totalGPUs"] == layout.num_ranks == 16
    assert output(7)["requiredBytes"] == plan.estimate.memory.known_bytes
    assert output(8)["checkpointFrequencySteps"] == plan.checkpoint_every
    assert sum(size or 0 for size in output(7)["breakdown"].values()) == output(7)["requiredBytes"]


def test_every_phase_has_layouts_in_the_engines_words():
    found = phased("engine=deepspeed", "layout.sharding=full")
    written = "\n".join(found.files.values())
    assert "ZeRO-3 over 16 ranks" in written
    assert "FSDP2 over" not in written


def test_cost_terms_add_up_and_carry_their_date():
    cost = output(14)
    assert cost["providerComparison"]
    for row in cost["providerComparison"]:
        assert sum(row["terms"].values()) == pytest.approx(row["usd"])
        assert row["asOf"]


def test_monitoring_names_metrics_that_are_recorded():
    of_scripts = {"num_steps", "not_finite"}
    assert set(output(9)["metrics"]) | of_scripts == set(StepMetrics.__dataclass_fields__)


def test_nothing_outdated_is_advised():
    said = json.dumps([dict(phase.output) for phase in phased().phases])
    text = re.sub(r"unset \w+  # [^\\]*", "", said)  # what is taken away may be named
    for word in ("Horovod", "TorchScript", "TensorRT", "NCCL_IB_DISABLE", "GDR_LEVEL", "--gpus "):
        assert word not in text


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cluster.nodes=1",),
        (
            "model={decoder: {layers: 2, hidden: 64, heads: 2}}",
            "cluster={accelerator: cpu, per_node: 2}",
            "train.precision=fp32",
        ),
    ],
)
def test_s2_16_every_script_is_one_that_bash_can_read(tmp_path: Path, overrides: tuple[str, ...]):
    made = phased(*overrides)
    launch = next(phase.output for phase in made.phases if phase.number == 13)
    assert made.files["validate.sh"] == launch["validationScript"]
    assert made.files["debug.sh"] == launch["debuggingScript"]
    for script in (made.files[f"{name}.sh"] for name in ("launch-script", "validate", "debug")):
        read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert read.returncode == 0, read.stderr


def test_the_launch_script_says_what_it_lacks(tmp_path: Path):
    script = tmp_path / "launch-script.sh"
    script.write_text(phased().files["launch-script.sh"])
    bash = shutil.which("bash")
    assert bash is not None
    ran = subprocess.run([bash, str(script)], text=True, capture_output=True, env={"PATH": "/bin"})
    assert ran.returncode != 0
    assert "HEAD_ADDRESS" in ran.stderr


def test_the_validation_script_says_what_failed(tmp_path: Path):
    script = tmp_path / "check.sh"
    script.write_text(output(13)["validationScript"])
    ran = subprocess.run(["bash", str(script)], cwd=tmp_path, text=True, capture_output=True)
    assert ran.returncode == 1
    assert "FAIL accelerators: expected 8" in ran.stderr


def ran_with(folder: Path, script: str, **commands: str) -> subprocess.CompletedProcess[str]:
    """A script of the phases, with these commands in place of the machine's."""
    for name, text in {script: phased().files[script], **commands}.items():
        (folder / name).write_text(text if name == script else f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", script], cwd=folder, env=path, text=True, capture_output=True, check=False
    )


DF = "echo 'Filesystem 1024-blocks Used Available Capacity Mounted'; echo \"x 1 1 {} 1% $2\""
READY = {
    "nvidia-smi": "seq 0 7",
    "cat": "echo '4: ACTIVE'; echo '4: ACTIVE'",
    "df": DF.format(10**12),
}


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, None),
        ({"nvidia-smi": "seq 0 17"}, "accelerators: expected 8, got: 18"),
        ({"nvidia-smi": "echo 'No devices were found'"}, "accelerators: expected 8, got: 0"),
        ({"cat": "echo '4: ACTIVE'; echo '1: DOWN'"}, "network ports: expected 4: ACTIVE, got: 1:"),
        ({"df": DF.format(9)}, "shared memory: expected at least 1073741824, got: 9216"),
        ({"df": "echo 'df: 99999999999999: no such folder'"}, "checkpoint storage: expected at l"),
    ],
)
def test_s2_12_the_validation_script_compares_numbers_as_numbers_and_states_whole(
    tmp_path: Path, changed: dict[str, str], failed: str | None
):
    found = ran_with(tmp_path, "validate.sh", **(READY | changed))
    assert found.returncode == (failed is not None), found.stderr
    assert f"FAIL {failed}" in found.stderr if failed else found.stderr == ""


def test_s2_12_a_check_that_fails_says_the_fix_and_a_folder_that_cannot_be_written_fails(
    tmp_path: Path,
):
    (tmp_path / "runs").write_text("a file where the folder should be")
    found = ran_with(tmp_path, "validate.sh", **(READY | {"nvidia-smi": "seq 0 3"}))
    assert "got: 4; fix: sudo dmesg" in found.stderr
    assert "FAIL checkpoint storage" in found.stderr


def test_s2_12_the_debugging_script_ends_as_the_launch_ends(tmp_path: Path):
    (tmp_path / "launch-script.sh").write_text("echo Using network IB; exit 7\n")
    found = ran_with(tmp_path, "debug.sh", **{"nvidia-smi": "echo topology of $*"})
    assert found.returncode == 7
    assert "topology of topo -m" in found.stdout
    assert "1 Using network IB" in found.stdout
    assert (tmp_path / "debug.log").read_text() == "Using network IB\n"


def test_a_plan_that_fits_passes_its_gates_but_for_the_reviews():
    found = phased()
    assert [each.status for each in found.gates if each.status == "review"] == ["review", "review"]
    assert {each.phase for each in found.gates} == {1, 3, 7, 11, 14, 16}
    assert exit_code(found.gates) == 0
    assert exit_code(found.gates, fail_on_gate=True) == 3
    assert exit_code(found.gates, fail_on_gate=True, yes=True) == 0


def test_what_does_not_fit_says_what_it_needs_at_the_least():
    found = phased(*TOO_LARGE)
    assert exit_code(found.gates, yes=True) == 3
    first = gate(found, 1)
    assert first.problem.code == "P020"
    least = output(1, *TOO_LARGE)["minimumRequirements"]
    assert least["minGPUs"] > 8
    assert least["minMemoryPerGPUBytes"] > 24 * 10**9
    assert output(1, *TOO_LARGE)["feasible"] is False


def test_the_memory_that_is_available_leaves_head_room():
    assert output(7)["availableBytes"] == plan_job(job_of()).limit_bytes


def test_what_needs_more_memory_than_there_is_lists_what_saves_some():
    found = phased(*TOO_LARGE)
    memory = output(7, *TOO_LARGE)
    assert memory["memoryExceeded"] is True
    assert memory["memoryGapBytes"] > 0
    options = memory["aggressiveOptimizations"]
    assert len(options) >= 3
    assert all(option["savesBytes"] > 0 for option in options[:3])
    assert gate(found, 7).problem.code == "P022"


def test_s2_3_what_the_planner_found_to_fit_is_listed_in_front_of_what_saves_some():
    found, memory = phased(*ONE_T4), output(7, *ONE_T4)
    ways = gate(found, 1).problem.fix.split("; or ")
    options = memory["aggressiveOptimizations"]
    assert [each["name"] for each in options[: len(ways)]] == ways
    assert {each["savesBytes"] for each in options[: len(ways)]} == {memory["memoryGapBytes"]}
    assert len(options) >= 3
    assert gate(found, 7).problem.fix.startswith(gate(found, 1).problem.fix)


def test_what_is_offloaded_is_what_the_plan_offloads():
    assert (
        output(7, *ONE_T4)["cpuOffloading"]["what"] == "parameters, gradients and optimizer on cpu"
    )


def test_an_infeasible_plan_ends_with_the_required_resources():
    final = json.loads(phased(*TOO_LARGE).files["final-training-plan.json"])
    assert final["success"] is False
    assert final["phase"] == "resource-assessment"
    assert final["requiredResources"]["minGPUs"] > 8
    assert "launch-script.sh" not in phased(*TOO_LARGE).files


def test_the_plan_of_a_refused_job_is_marked_and_can_be_neither_started_nor_paid():
    page = phased(*ONE_T4).files["final-training-plan.md"]
    job_of_it, _, of_another = page.partition("## Not this job's plan: 1 node x 1 T4 with ")
    assert "P001" in job_of_it
    assert "phase 7, Memory Constraint Warning: **failed**" in job_of_it
    assert "| layout |" in of_another
    assert "| layout |" not in job_of_it
    for absent in ("launch-script.sh", "on demand", "as declared", "accelerator-hours"):
        assert absent not in page
    whole = phased().files["final-training-plan.md"]
    assert "| start | bash launch-script.sh |" in whole
    assert "on demand" in whole
    assert "Not this job's plan" not in whole


def test_with_the_least_memory_that_is_named_it_does_fit(tmp_path: Path):
    least = output(1, *TOO_LARGE)["minimumRequirements"]["minMemoryPerGPUBytes"]
    own = tmp_path / "larger.toml"
    own.write_text(f"[accelerators.L4]\nmemory_bytes = {least}\n", encoding="utf-8")
    assert plan_job(job_of(*TOO_LARGE, f"cluster.catalog={own}")).layout.num_ranks == 8


def test_s2_3_the_gap_is_what_is_required_less_what_is_available():
    memory = output(7, *TOO_LARGE)
    assert memory["memoryGapBytes"] == memory["requiredBytes"] - memory["availableBytes"] > 0


def test_s2_15_the_tradeoffs_are_a_front_and_the_breakdown_adds_up():
    cost = output(14)
    parts = [each for each in cost["breakdown"].values() if each is not None]
    assert sum(parts) == pytest.approx(cost["estimatedCostUSD"])
    front = cost["costVsTimeTradeoffs"]
    assert len(front) > 1
    assert [each["hours"] for each in front] == sorted(each["hours"] for each in front)
    dollars = [each["usd"] for each in front]
    assert dollars == sorted(dollars, reverse=True)


def test_a_budget_that_is_too_small_names_what_it_pays_for():
    found = phased(goals=Goals(budget_usd=100.0))
    problem = gate(found, 14).problem
    assert problem.code == "P023"
    assert "over the budget of $100" in problem.what
    assert "train.steps:" in problem.fix
    assert exit_code(found.gates) == 0
    assert exit_code(found.gates, fail_on_gate=True, yes=True) == 3


def test_s2_3_a_refusal_and_its_memory_gate_name_one_layout_and_what_it_takes():
    with pytest.raises(PlanError) as refused:
        plan_job(job_of(*TOO_LARGE))
    needed = refused.value.needed_bytes
    assert output(7, *TOO_LARGE)["requiredBytes"] == needed
    text = format_bytes(needed)
    assert f"needs {text} a rank" in gate(phased(*TOO_LARGE), 1).problem.what
    assert f"the leanest plan needs {text} of" in gate(phased(*TOO_LARGE), 7).problem.what


def test_s4_16_a_budget_that_nothing_reaches_names_the_cheapest_that_there_is():
    problem = gate(phased(goals=Goals(budget_usd=1.0)), 14).problem
    assert problem.fix.startswith("nothing is within it: the cheapest is ")
    least = min(each["usd"] for each in output(14)["providerComparison"])
    assert f"${least:,.0f} in " in problem.fix or "cluster.nodes=" in problem.fix


def test_s4_16_plan_and_phase_14_hold_a_budget_against_the_same_cost():
    cost = plan_job(job_of()).cost.usd
    assert output(14)["estimatedCostUSD"] == cost
    assert {"storage", "egress"} <= plan_job(job_of()).cost.terms.keys()
    over, within = (gate(phased(goals=Goals(budget_usd=cost + by)), 14) for by in (-0.01, 0.01))
    assert (over.status, within.status) == ("failed", "passed")
    assert f"${cost:,.2f} at " in over.problem.what


def test_fewer_nodes_within_the_budget_come_first_with_price_and_hours():
    cost = output(14, *A100)
    one = next(each for each in cost["costVsTimeTradeoffs"] if each["strategy"].endswith(" 1 node"))
    assert one["usd"] < min(each["usd"] for each in cost["providerComparison"])
    problem = gate(phased(*A100, goals=Goals(budget_usd=one["usd"] + 1)), 14).problem
    offered = f"cluster.nodes=1 (ZeRO-2 over 8 ranks, at {one['basis'].split()[-1]}): "
    dollars = f"${one['usd']:,.0f}"
    assert f"{offered}{dollars} in {format_seconds(3600 * one['hours'])}; " in problem.fix
    assert any(
        each.startswith(f"{offered}{dollars} instead") for each in cost["savingOpportunities"]
    )
    # On spot it costs less still, and comes first.
    assert problem.fix.startswith("cluster.nodes=1 (ZeRO-2 over 8 ranks, at aws, spot (interr")


def test_fewer_nodes_that_miss_the_deadline_are_not_offered():
    late = Goals(budget_usd=100.0, deadline_s=60.0)
    assert "cluster.nodes=1" in gate(phased(*A100, goals=Goals(budget_usd=100.0)), 14).problem.fix
    assert "cluster.nodes=1" not in gate(phased(*A100, goals=late), 14).problem.fix


def test_a_budget_that_is_enough_passes():
    assert gate(phased(goals=Goals(budget_usd=1e9)), 14).status == "passed"


def test_a_deadline_that_is_missed_names_the_nodes_it_takes():
    found = phased(goals=Goals(deadline_s=60.0))
    problem = next(each for each in found.gates if each.name == "Deadline Warning").problem
    assert problem.code == "P024"
    assert "cluster.nodes" in problem.fix


def test_a_deadline_that_more_nodes_meet_names_the_fewest_of_those_that_were_planned():
    """It named nodes in proportion, and only half, a quarter and twice the nodes were planned."""
    found = phased(*A100, goals=Goals(deadline_s=3600.0))
    problem = next(each for each in found.gates if each.name == "Deadline Warning").problem
    assert problem.fix.startswith("set cluster.nodes to 6, which take 5")
    assert problem.fix.endswith(" (planned on 1, 3, 4, 6, 8 nodes as well)")


def test_a_batch_that_does_not_divide_is_the_planners_own_problem():
    with pytest.raises(PlanError) as caught:
        phased("train.global_batch=7", "layout.data=16")
    assert all(problem.code != "P001" for problem in caught.value.problems)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_s2_2_the_bubble_is_that_of_the_plans_schedule(schedule):
    """A zero-bubble pipeline had the bubble of 1F1B."""
    asked = ("layout.pipeline=4", f"layout.schedule={schedule}")
    found = output(3, *asked)["pipelineParallelConfig"]
    layout = replan(job_of(*asked), advise=True).layout
    assert found["bubbleShare"] == bubble_share(layout)
    of_1f1b = 3 / (found["chunks"] * found["microBatches"] + 3)  # arXiv:2104.04473, section 2.2
    is_less = schedule == "zero-bubble"
    assert (found["bubbleShare"] < 0.9 * of_1f1b) == is_less


def test_debugging_that_undoes_paceline_runs_recovery_is_for_other_engines():
    levels = {}
    for engine in ("paceline", "torchtitan"):
        launch = next(
            each.output for each in phased(f"engine={engine}").phases if each.number == 13
        )
        levels[engine] = re.findall(r"TORCH_DISTRIBUTED_DEBUG=(\w+)", launch["debuggingScript"])
    assert levels == {"paceline": ["INFO"], "torchtitan": ["DETAIL"]}


def test_the_phase_of_faults_says_what_a_run_does():
    found = output(8)
    assert found["appliesTo"] == "`paceline run`"
    assert "the workers that live stay" in found["strategy"]
    ranks = found["elastic"]["max"]
    assert found["elastic"]["min"] < ranks == 16
    fixed = output(8, "recovery.shrink=false", "checkpoint.copy_to=s3://bucket/runs")
    assert fixed["elastic"]["min"] == ranks
    assert fixed["storageLocation"]["backup"] == "s3://bucket/runs"


def test_s2_2_the_phase_of_faults_is_what_the_engine_and_the_job_do():
    own = output(8, "recovery.patience=25s", "recovery.heartbeat=7s")["failureDetection"]
    assert "at least 25 s" in own["timeout"]
    assert "silent for 7 s" in own["interval"]
    assert "off: the run never" in output(8, "recovery.shrink=false")["elastic"]["up"]
    other = output(8, "engine=deepspeed")
    assert "newest checkpoint of deepspeed" in other["strategy"]
    assert other["elastic"]["min"] == other["elastic"]["max"] == 16
    macs = output(8, "engine=mlx", "cluster.accelerator=M2-Ultra", "cluster.per_node=1", *SMALL)
    assert macs["recoveryPlan"] == macs["recoveryPlan"] | {"automatic": False, "maxAttempts": 0}
    assert "first Mac" in macs["storageLocation"]["primary"]
    assert output(8, "cluster.nodes=1", *SMALL)["storageLocation"]["type"] == "local disk"


def test_s2_2_types_are_those_of_the_engine_and_of_compressed_gradients():
    def types(*given: str) -> tuple[str, str]:
        kept = output(6, *given)["mixedPrecision"]
        return kept["parameters"], kept["reduce"]

    assert types() == ("float32", "float32")
    assert types("engine=deepspeed") == ("bfloat16, copied in float32", "bfloat16")
    assert types("engine=deepspeed", "train.precision=fp32", *SMALL) == ("float32", "float32")
    sent = ("train.gradient_compression=fp16", "layout.sharding=none", *SMALL)
    assert types(*sent) == ("float32", "float16")
    assert output(5, *sent)["compression"].startswith("fp16: gradients are sent in float16, which")
    assert output(5)["compression"] == "none: gradients are added up in float32"


def test_s2_2_the_host_file_has_the_jobs_hosts_and_no_names_that_are_made_up():
    found = output(13, "ssh.hosts=[me@node-a,node-b]")
    assert found["hostfile"] == ["me@node-a", "node-b"]
    assert found["network"]["masterAddress"] == "node-a"
    assert output(13)["hostfile"] == []


def test_s2_2_settings_of_kernels_are_the_jobs():
    given = ("train.precision=tf32", "train.deterministic=true", *SMALL)
    assert output(12, *given)["cudnn"] == {"benchmark": False, "deterministic": True, "TF32": True}
    (first, *_) = output(12, "train.precision=fp32", *SMALL)["appliedOptimizations"]
    assert first["why"] == "the job asks for fp32"


def test_s2_2_the_bucket_sentence_and_the_overhead_are_one_number():
    given = (*SMALL, "layout.sharding=none", "train.global_batch=64")
    found = output(5, *given)
    waits = re.search(r"\((.*), estimated\)", found["estimatedCommunicationOverhead"])
    assert waits is not None
    assert f": {waits[1]} of the reduction is exposed" in found["gradientBucketing"]
    assert re.findall(r"[\d.]+ m?s\b", found["gradientBucketing"]) == [waits[1]]


def test_s2_2_phase_8_shrinks_no_further_than_memory_allows():
    def elastic(nodes: int) -> dict[str, Any]:
        sharded = ("model.preset=llama-3-70b", f"cluster.nodes={nodes}", "layout.sharding=full")
        more = (f"train.global_batch={16 * nodes}", "layout.recompute=full")
        exactly = ("layout.micro_batch=2", "layout.recompute_every=1")
        return dict(output(8, *sharded, *more, *exactly)["elastic"])

    four, two = elastic(4), elastic(3)
    assert 16 < four["min"] <= 24 < four["max"] == 32
    assert re.search(r"may run out of memory, .*: a rank then needs 7\d", four["down"])
    assert 16 < two["min"] <= 24
    assert re.search(r"a rank then needs .*: the run waits for a new node", two["down"])
    small = output(8, *SMALL)["elastic"]
    assert small["min"] == 1
    assert "out of memory" not in small["down"]


def test_s2_14_scaling_is_tested_on_numbers_of_ranks_that_hold_the_model():
    tests = output(15, "layout.sharding=full", "layout.micro_batch=4", "layout.data=16")
    least = output(8, "layout.sharding=full", "layout.micro_batch=4", "layout.data=16")["elastic"]
    assert least["min"] > 1
    for kind in ("weak", "strong"):
        ranks = [int(each["name"].split()[0]) for each in tests["scalingTests"][kind]]
        assert ranks == sorted(ranks)
        assert (ranks[0] >= least["min"], ranks[-1]) == (True, 16)
    small = output(15, *SMALL)["scalingTests"]["weak"]
    assert small[0]["name"].startswith("1 rank,")
    (none,) = output(15, "layout.tensor=8", "layout.pipeline=2")["scalingTests"]["weak"]
    assert none["name"] == "none: this layout is not possible on fewer than 16 ranks"


def test_s2_14_the_tests_of_a_plan_for_this_machine_are_commands():
    """They were figures to look at ("step_s over 50 steps"), and no command made them."""
    here = ("cluster.accelerator=cpu", "cluster.nodes=1", "cluster.per_node=2")
    tests = output(15, *SMALL, *here, "train.global_batch=8")
    weak, strong = tests["scalingTests"]["weak"], tests["scalingTests"]["strong"]
    bench = "paceline bench job.yaml --ranks 1,2 --steps 50"
    assert {each["how"] for each in strong} == {bench}
    assert {each["how"] for each in weak} == {f"{bench} --weak --set train.global_batch=4"}
    assert weak[0]["name"] == "1 rank, 4 samples a step"
    for tested in (tests, output(15)):
        assert tested["gradientCorrectness"]["method"].endswith(": paceline verify job.yaml")
    elsewhere = output(15, *SMALL)["scalingTests"]
    assert elsewhere["weak"][0]["how"] == "step_s over 50 steps"


def test_s2_2_out_of_memory_is_answered_by_a_setting_that_changes_the_plan():
    def answer(*overrides: str) -> str:
        return str(output(15, *overrides)["troubleshootingGuide"][0]["how"])

    assert answer("layout.micro_batch=4", "layout.sharding=full").endswith("micro_batch=2")
    one = ("layout.micro_batch=1", "layout.sharding=full")
    assert answer(*one, "layout.recompute=none") == "--set layout.recompute=selective"


def test_s1_16_phase_8_says_how_many_ranks_go_on_after_a_lost_node():
    three = ("cluster.nodes=3", "cluster.per_node=1", "train.global_batch=9", *SMALL)
    down = output(8, *three, "layout.data=3", "layout.micro_batch=1")["elastic"]["down"]
    assert down == (
        "after a lost node 2 of the 2 remaining ranks continue, with 5 or 4 samples a data rank: "
        "the same global batch of 9; a spare process (1 kept) first takes a lost rank's place"
    )
    one = output(8, *three, "layout.data=3", "recovery.batch=shrink", "train.global_batch=3")
    assert "with 1 sample a data rank: " in one["elastic"]["down"]
    none = output(8, *three, "layout.data=3", "layout.micro_batch=1", "recovery.spares=0")
    assert "spare" not in none["elastic"]["down"]
    assert output(8, "recovery.shrink=false")["elastic"]["down"].startswith(
        "recovery.shrink is off"
    )


@pytest.mark.parametrize(
    ("optimizer", "rate", "rule"), [("sgd", "0.002", "linear"), ("adamw", "0.002449", "sqrt")]
)
def test_s1_16_phase_8_says_the_batch_and_the_rate_after_a_lost_node(optimizer, rate, rule):
    three = ("cluster.nodes=3", "cluster.per_node=1", "train.global_batch=9", *SMALL)
    more = ("layout.data=3", "layout.micro_batch=1", "recovery.batch=shrink")
    rates = (f"train.optimizer={optimizer}", "train.learning_rate=0.003")
    down = output(8, *three, *more, *rates)["elastic"]["down"]
    assert down.startswith(
        "after a lost node 2 of the 2 remaining ranks continue, with 3 samples a data rank: "
        "the global batch shrinks from 9 to 6 and the learning rate from 0.003 to "
        f"{rate} ({rule} rule, {optimizer})"
    )


SHORT = ("cluster.accelerator=A100-80", "train.global_batch=64", "train.steps=300")


def test_s2_2_no_checkpoint_is_advised_beyond_the_end_of_the_run():
    assert output(8, *SHORT)["advisedFrequencySteps"] == 300


def test_s2_2_a_saving_of_less_than_a_dollar_is_none():
    found = output(14, *SHORT)["savingOpportunities"]
    assert found
    for each in found:
        assert "$0" not in each
        dollars = re.search(r": (\$[\d,]+) instead of (\$[\d,]+)", each)
        assert dollars is None or dollars[1] != dollars[2]


@pytest.mark.parametrize("overrides", [(), TOO_LARGE, SMALL, ("layout.pipeline=4",)])
def test_s2_2_every_null_has_its_reason(overrides: tuple[str, ...]):
    def nulls(value: Any, name: str) -> Iterator[str]:
        if value is None:
            yield name
        if isinstance(value, dict):
            for key, each in value.items():
                yield from nulls(each, f"{name}.{key}".lstrip("."))

    for phase in phased(*overrides).phases:
        reasons = phase.output.get("nullReasons", {})
        assert set(nulls(dict(phase.output), "")) == set(reasons), phase.name
        assert all(reasons.values())


def test_every_alert_of_a_plan_says_what_sets_it_off():
    assert all(each["threshold"] for each in output(9)["alertingRules"])


FIXED_DDP = (
    "layout.sharding=none",
    "layout.tensor=1",
    "layout.pipeline=1",
    "layout.context=1",
    "layout.offload=none",
    "model.preset=llama-3-70b",
)


def test_s2_3_a_layout_that_no_number_of_accelerators_fits_says_so_and_what_memory_does():
    found = output(1, *FIXED_DDP)
    least = found["minimumRequirements"]
    assert least["minGPUs"] is None
    assert "no number" in found["nullReasons"]["minimumRequirements.minGPUs"]
    assert "no number of those there are fits" in gate(phased(*FIXED_DDP), 1).problem.what


def test_s2_2_what_fits_needs_no_more_ranks_than_it_has():
    found = output(1, *ONE_T4, "model.preset=llama-3.2-1b")
    assert found["feasible"]
    assert found["minimumRequirements"]["minGPUs"] == found["availableGPUs"] == 1


STAGES = (
    "layout.tensor=8",
    "layout.pipeline=2",
    "layout.data=1",
    "cluster.network=25Gb/s Ethernet",
    "cluster.rdma=false",
)


def test_s2_2_stages_that_wait_for_messages_are_given_a_network():
    found = output(1, *STAGES)
    by_name = {each["resource"]: each["mitigation"] for each in found["bottlenecks"]}
    assert "waiting for messages" in by_name["network between stages"]
    assert found["minimumRequirements"]["minBandwidthBytesPerSecond"] > 1e9
    assert "idle stages" not in by_name


def test_s2_2_a_link_of_ones_own_catalog_is_the_network_that_is_needed_less_of(tmp_path):
    (tmp_path / "own.toml").write_text(
        '[links.campus-fibre]\nkind = "tcp"\nper = "port"\nbytes_per_s = "40Gb/s"\n'
        'latency_s = 80e-6\nis_rdma = false\nsource = "measured"\n'
    )
    own = ("cluster.nodes=2", "cluster.network=37Gb/s", f"cluster.catalog={tmp_path / 'own.toml'}")
    least = output(1, *own)["minimumRequirements"]["minBandwidthBytesPerSecond"]
    assert 0 < least <= 37e9 / 8


def test_s2_1_one_data_rank_is_not_called_elastic():
    job = job_of(*STAGES)
    faults = format_contract(replan(job), job, "002")["faultTolerance"]
    assert faults["elasticTraining"] is False
    assert "fewer cannot hold this layout" in faults["recoveryStrategy"]
    eighth = output(8, *STAGES)
    assert "fewer cannot hold this layout" in eighth["strategy"]
    assert eighth["elastic"]["min"] == eighth["elastic"]["max"] == 16
    assert format_contract(replan(job_of()), job_of(), "002")["faultTolerance"]["elasticTraining"]


def test_s2_2_every_accumulated_micro_batch_gathers_again():
    """7 of llama-3-8b's 8 billion parameters are in blocks, gathered for both passes in bf16."""
    given = ("layout.data=16", "layout.sharding=full", "layout.micro_batch=2")
    found = output(3, *given)["communicationPattern"]
    assert "accumulation 4:" in found["allReduceVolume"]
    gathered, reduced = 4 * 2 * 2 * 15 / 16, 4 * 4 * 15 / 16
    assert gathered * 6.9e9 < found["allReduceBytes"] < (gathered + reduced) * 8.1e9


def test_s2_3_phase_7_says_what_one_plan_says():
    """Context ranks share the state as well; gradients that wait whole are not on the host."""
    layout = ("layout.data=8", "layout.context=2", "layout.sharding=zero1")
    memory = output(7, *layout, "layout.offload=cpu", "layout.offload_parameters=true")
    names = [each["name"] for each in memory["aggressiveOptimizations"]]
    assert f"everything sharded over the {memory['zero']['over']} data ranks" in names
    waiting = format_bytes(memory["breakdown"]["gradients"])
    assert f"the {waiting} of gradients here" in memory["cpuOffloading"]["what"]
