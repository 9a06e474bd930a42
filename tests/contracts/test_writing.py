"""A plan in the words of the two older JSON contracts."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.command import run_command

from paceline.check.preflight.layers import LAYERS
from paceline.contracts.operate import STATE_SOURCES, health_checks
from paceline.contracts.reading import check_training_plan, contract_kind, parse_contract
from paceline.contracts.writing import format_contract
from paceline.contracts.writing.engineer import node_assignments, strategy_of
from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.job.alerts import DEFAULTS
from paceline.launch.default_alerts import alerts
from paceline.launch.script_numbers import Numbers
from paceline.live import serve
from paceline.plan import Plan, plan_job, plan_to_json

JOB = """\
name: try
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
train: {global_batch: 128, steps: 10000}
"""
SPLIT = ("layout.tensor=4", "layout.pipeline=2")
SEVEN_SECTIONS = {
    "strategy": {"approach", "total_gpus", "nodes", "gpus_per_node"},
    "batch_configuration": {
        "per_gpu_batch_size",
        "total_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "warmup_epochs",
    },
    "distributed_config": {"mlx_launch_command", "gradient_sync", "unified_memory"},
    "rdma_config": {"enabled", "platform", "network", "expected_speedup", "env_vars"},
    "checkpoint_strategy": {
        "approach",
        "async",
        "compression",
        "storage",
        "frequency",
        "retention",
        "expected_recovery_time",
    },
    "performance_targets": {"throughput", "gpu_utilization", "checkpoint_overhead"},
}
OUTPUT_SCHEMA = {
    "distributedConfig": {
        "strategy": str,
        "worldSize": int,
        "backend": str,
        "initMethod": str,
        "backends": dict,
    },
    "resourceAllocation": {
        "nodeAssignments": list,
        "memoryPerNode": str,
        "shardingStrategy": str,
    },
    "checkpointStrategy": {"frequency": str, "storage": str, "retention": str},
    "faultTolerance": {
        "elasticTraining": bool,
        "recoveryStrategy": str,
        "healthChecks": list,
    },
    "monitoringSetup": {"metrics": list, "alerts": list, "dashboardUrl": str},
}
CPUS = (
    "model={decoder: {layers: 2, hidden: 64, heads: 2}}",
    "cluster={accelerator: cpu, per_node: 2}",
    "train.precision=fp32",
)
_PLANS: dict[tuple[str, ...], tuple[Job, Plan]] = {}


def planned(*overrides: str) -> tuple[Job, Plan]:
    if overrides not in _PLANS:
        job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
        _PLANS[overrides] = job, plan_job(job)
    return _PLANS[overrides]


def formatted(kind: Any, *overrides: str) -> dict[str, Any]:
    job, plan = planned(*overrides)
    return json.loads(json.dumps(format_contract(plan, job, kind)))


def test_the_engineers_output_has_every_field_of_the_schema_in_its_type():
    found = formatted("002")
    assert set(found) == set(OUTPUT_SCHEMA)
    for section, fields in OUTPUT_SCHEMA.items():
        for name, kind in fields.items():
            assert type(found[section][name]) is kind, f"{section}.{name}"


def test_s2_4_every_rank_has_a_node_and_a_place():
    _, plan = planned(*SPLIT)
    rows = node_assignments(plan)
    assert len(rows) == 16
    assert [row["rank"] for row in rows] == list(range(16))
    assert {row["node"] for row in rows} == {0, 1}
    places = {(row["tp"], row["pp"], row["dp"], row["cp"]) for row in rows}
    assert len(places) == 16
    assert rows[5]["gpu"] == 5
    assert rows[5]["tp"] == 1


def test_s2_5_memory_of_a_node_is_that_of_its_ranks():
    _, plan = planned()
    resources = formatted("002")["resourceAllocation"]
    assert resources["memoryPerNodeBytes"] == 8 * plan.estimate.memory.known_bytes


@pytest.mark.parametrize("steps", [1000, 60_000])
def test_s2_6_an_interval_that_nobody_set_is_the_best_one(steps):
    asked = (f"train.steps={steps}", "cluster.nodes=32", "train.global_batch=4096")
    said = formatted("002", *asked)["checkpointStrategy"]
    assert said["bestIntervalSteps"] == said["frequencySteps"]
    fixed = formatted("002", *asked, "checkpoint.every=500")["checkpointStrategy"]
    assert fixed["frequencySteps"] == 500
    assert fixed["bestIntervalSteps"] != 500


@pytest.mark.parametrize(
    ("overrides", "strategy"),
    [
        ((), "data-parallelism"),
        (SPLIT, "hybrid-3d-parallelism"),
        (("layout.tensor=8", "layout.pipeline=1"), "tensor-parallelism"),
    ],
)
def test_the_strategy_is_the_nearest_word_that_the_schema_has(overrides, strategy):
    if not overrides:
        overrides = ("layout.tensor=1", "layout.pipeline=1", "layout.context=1")
    job, plan = planned(*overrides)
    assert strategy_of(plan.layout, job.spec.layout) == strategy


@pytest.mark.parametrize("overrides", [(), SPLIT])
def test_s4_1_a_training_plan_agrees_with_itself(overrides: tuple[str, ...]):
    found = formatted("004", *overrides)
    assert check_training_plan(found, "plan.json") == []
    strategy, batch = found["strategy"], found["batch_configuration"]
    assert strategy["nodes"] * strategy["gpus_per_node"] == strategy["total_gpus"]
    product = batch["per_gpu_batch_size"] * batch["gradient_accumulation_steps"]
    assert product * batch["data_parallel_size"] == batch["total_batch_size"] == 128


def test_s4_1_a_training_plan_has_all_twelve_sections_with_their_keys():
    found = formatted("004")
    for section, keys in SEVEN_SECTIONS.items():
        assert keys <= set(found[section]), section
    assert isinstance(found["verification_steps"], list)
    assert found["version"] == "2.0.0"
    for section in (
        "pre_rdma_sync",
        "hardware_calibration",
        "worker_consistency",
        "coordinator_chunking",
        "pre_flight_checklist",
    ):
        assert isinstance(found[section], dict)


def test_a_training_plan_can_be_read_back_as_a_job():
    text = json.dumps(formatted("004"))
    assert contract_kind(json.loads(text)) == "004"
    contract = parse_contract(
        text, source="plan.json", folder=Path("/nowhere"), overrides=["model.preset=llama-3-8b"]
    )
    assert contract.findings == ()
    assert contract.job.spec.train.global_batch == 128


def test_s4_1_a_network_whose_kind_is_assumed_has_the_reason_beside_it():
    told = formatted("004", "cluster.network=100Gb/s")["rdma_config"]
    assert told["network"] == "infiniband-edr"
    assert "write its kind beside the rate, `100Gb/s Ethernet`" in told["network_reason"]
    named = formatted("004", "cluster.network=100Gb/s InfiniBand")["rdma_config"]
    assert "write its kind" not in str(named["network_reason"])


def test_a_plan_for_gpus_starts_torchrun_and_sets_no_nccl_variable():
    found = formatted("004")
    assert found["distributed_config"]["mlx_launch_command"] is None
    assert "torchrun --nnodes=2 --nproc-per-node=8" in found["distributed_config"]["launch_command"]
    assert found["rdma_config"]["env_vars"] == {}
    assert any("Using network IB" in step for step in found["verification_steps"])
    assert found["checkpoint_strategy"]["compression"] == "none"


def test_a_plan_for_macs_starts_mlx_with_flags_that_exist():
    found = formatted("004", *MACS)
    command = found["distributed_config"]["mlx_launch_command"]
    assert command.startswith("mlx.launch --hostfile hosts.json --backend ")
    assert "--gpus" not in command
    assert found["distributed_config"]["gradient_sync"] == "mlx.nn.average_gradients(grads)"
    assert found["distributed_config"]["unified_memory"] is True
    assert "NCCL" not in json.dumps(found["verification_steps"])
    assert check_training_plan(found, "plan.json") == []


def test_s2_13_the_alerts_of_a_contract_are_the_rules_that_the_run_judges():
    _, plan = planned()
    listed = formatted("002")["monitoringSetup"]["alerts"]
    assert [row["condition"] for row in listed] == [rule.condition for rule in alerts(plan)]
    assert all(row["metric"] and row["action"] for row in listed)
    assert {rule.name for rule in alerts(plan)} <= set(DEFAULTS)


def test_s2_13_the_dashboard_is_the_page_that_paceline_watch_serves():
    found = formatted("002")["monitoringSetup"]
    assert found["dashboardUrl"] == f"http://127.0.0.1:{serve._PORT}"
    assert found["dashboardCommand"] == "paceline watch"


def test_a_rate_below_the_plans_range_is_slow():
    _, plan = planned()
    (slow,) = (rule for rule in alerts(plan) if rule.name == "slow")
    assert slow.below is not None
    assert slow.below <= 0.8 * (plan.estimate.tokens_per_s or 0)


def test_s2_13_health_checks_are_commands_with_what_they_print():
    _, plan = planned()
    checks = health_checks(plan)
    assert {"accelerators", "network ports", "checkpoint storage"} <= {each.name for each in checks}
    assert all(each.command and each.expect for each in checks)


@pytest.mark.parametrize("shrink", [True, False])
def test_s2_1_recovery_is_what_the_job_does(shrink):
    asked = (f"recovery.shrink={str(shrink).lower()}", "recovery.state=checkpoint")
    faults = formatted("002", *asked)["faultTolerance"]
    assert faults["elasticTraining"] is shrink
    assert "the newest valid checkpoint" in faults["recoveryStrategy"]
    assert ("fewer data ranks" in faults["recoveryStrategy"]) == shrink


@pytest.mark.parametrize("state", ["auto", "checkpoint"])
def test_recovery_names_the_source_of_state_that_the_plan_chose(state):
    asked = (f"recovery.state={state}", "layout.sharding=full")
    _, plan = planned(*asked)
    assert plan.state is not None
    told = [
        formatted("002", *asked)["faultTolerance"]["recoveryStrategy"],
        formatted("004", *asked)["checkpoint_strategy"]["approach"],
    ]
    for text in told:
        assert f"get their state from {STATE_SOURCES[plan.state.chosen]}; " in text
        assert "other ranks, from snapshots" not in text


def test_s2_5_usable_memory_is_what_the_plan_may_use():
    _, plan = planned()
    resources = formatted("002")["resourceAllocation"]
    assert resources["usablePerRankBytes"] == plan.limit_bytes < plan.cluster.usable_bytes
    assert json.loads(plan_to_json(plan))["limit_bytes"] == plan.limit_bytes


@pytest.mark.parametrize(
    ("batch", "steps", "enabled", "length", "num"),
    [
        (16, 3125, True, 3125, 1),  # 50,000 samples
        (16, 3124, False, None, 1),
        (16, 3126, True, 3125, 2),
        (48, 3125, True, 1041, 4),  # 49,968 samples each
        (65536, 2, True, 1, 2),
    ],
)
def test_s4_17_from_50_000_samples_on_a_chunk_is_the_steps_between_two_checkpoints(
    batch, steps, enabled, length, num
):
    changes = (f"train.steps={steps}", f"train.global_batch={batch}")
    chunks = formatted("004", *changes)["coordinator_chunking"]
    assert (chunks["enabled"], chunks["num_chunks"]) == (enabled, num)
    assert chunks.get("steps_per_chunk") == length
    if enabled:
        setting = chunks["setting"]
        assert setting == f"checkpoint.every={length}"
        again = formatted("004", *changes, setting)
        assert again["coordinator_chunking"]["is_saved_after_each"]
        assert again["checkpoint_strategy"]["frequency"] == f"every_{length}_steps"


def test_s4_17_a_run_of_no_samples_is_refused():
    with pytest.raises(JobError, match=r"train\.steps"):
        formatted("004", "train.steps=0")


def test_s2_6_backends_are_used_available_or_not_available_with_the_reason():
    asked = ("cluster.nodes=2", "ssh.hosts=[trainer@node-a, node-b]")
    config = formatted("002", *asked)["distributedConfig"]
    assert config["initMethod"] == "tcp://node-a:29500"
    assert formatted("002")["distributedConfig"]["initMethod"] == "env://"
    said = config["backends"]
    assert said[config["backend"]] == "used by this plan"
    assert [name for name, each in said.items() if each.startswith("used")] == [config["backend"]]
    assert said["gloo"] == "available on devices of: any"
    for name in ("xccl", "mpi", "ucc"):
        assert said[name].startswith("not available: ")


MACS = (
    "cluster.accelerator=M2-Ultra",
    "cluster.nodes=2",
    "cluster.per_node=1",
    "model.preset=llama-3.2-1b",
    "train.global_batch=8",
    "layout.sharding=none",
)


RDMA = ("cluster.accelerator=M3-Ultra", "cluster.rdma=true")


@pytest.mark.parametrize("overrides", [(), MACS], ids=["gpus", "macs"])
def test_s4_1_the_checklist_has_eight_checks_and_every_one_a_fix(overrides):
    found = formatted("004", *overrides)["pre_flight_checklist"]
    assert [check["name"] for check in found["checks"]] == list(LAYERS)
    assert len(LAYERS) == 8
    assert all(check["fix_command"] and check["command"] for check in found["checks"])
    by_hand = [each for check in found["checks"] for each in check["by_hand"]]
    _, plan = planned(*overrides)
    assert len(by_hand) == len(health_checks(plan))
    assert all(each["fix_command"] for each in by_hand)


def test_s4_1_the_plan_for_macs_has_commands_that_macs_have_and_what_their_engine_does():
    found = formatted("004", *MACS)
    text = json.dumps(found)
    assert not re.search(r"/dev/shm|--output=|sha256sum|nvidia-smi|/sys/class", text)
    checkpoints = found["checkpoint_strategy"]
    assert checkpoints["async"] is False
    assert "start launch.sh" in checkpoints["approach"]
    assert formatted("004")["checkpoint_strategy"]["async"] is True
    faults = formatted("002", *MACS)["faultTolerance"]
    assert faults["elasticTraining"] is False
    assert "start launch.sh" in faults["recoveryStrategy"]


def nulls_in(value: Any, before: str = "") -> set[str]:
    if isinstance(value, dict):
        return {each for key, inner in value.items() for each in nulls_in(inner, f"{before}.{key}")}
    return {before[1:]} if value is None else set()


@pytest.mark.parametrize(
    "overrides",
    [(), MACS, (*MACS, "cluster.nodes=1"), ("cluster.nodes=1", "cluster.network=auto")],
    ids=["gpus", "macs", "one mac", "one node"],
)
def test_s4_1_every_null_has_its_reason(overrides):
    found = formatted("004", *overrides)
    reasons = found.pop("null_reasons")
    assert nulls_in(found) == set(reasons)
    assert all(reasons.values())


def test_s4_1_what_is_compared_between_workers_is_what_the_target_has():
    macs = formatted("004", *MACS)["worker_consistency"]["compare"]
    assert {"mlx", "macOS", "code"} <= set(macs)
    assert not {"NCCL", "driver", "torch"} & set(macs)
    assert {"NCCL", "driver", "torch"} <= set(formatted("004")["worker_consistency"]["compare"])


def test_s4_1_commands_name_the_file_that_was_given_and_what_was_set():
    job = parse_job(JOB, source="my c.yaml", folder=Path("/nowhere"), overrides=["train.steps=9"])
    found = json.loads(json.dumps(format_contract(plan_job(job), job, "004")))
    assert "job.yaml" not in json.dumps(found)
    assert found["pre_rdma_sync"]["command"] == "paceline sync 'my c.yaml' --set train.steps=9"


def test_s4_1_copies_in_another_storage_are_named_where_the_engine_makes_them():
    keep = "checkpoint.copy_to=s3://heron/c"
    told = formatted("004", keep)["checkpoint_strategy"]
    assert told["storage"].endswith("copied to s3://heron/c")
    assert told["compression"] == "none; copies where that is faster"
    told = formatted("004", keep, "checkpoint.compress=never")["checkpoint_strategy"]
    assert told["compression"] == "none"
    told = formatted("004", keep, *MACS)["checkpoint_strategy"]
    assert "does not copy to s3://heron/c" in told["storage"]


def answered(stated: dict[str, Any], *overrides: str) -> dict[str, dict[str, Any]]:
    text = json.dumps(stated)
    contract = parse_contract(
        text,
        source="plan.json",
        folder=Path("/nowhere"),
        overrides=["model.preset=llama-3-8b", *overrides],
    )
    found = format_contract(plan_job(contract.job), contract.job, "004", stated=stated)
    return {row["key"]: row for row in json.loads(json.dumps(found))["stated"]}


STATED = {
    "strategy": {"nodes": 2, "gpus_per_node": 8, "total_gpus": 16},
    "batch_configuration": {"total_batch_size": 128, "learning_rate": 0.0003},
    "checkpoint_strategy": {
        "async": False,
        "storage": "gs://reeds/x",
        "frequency": "every_250_steps",
        "retention": "last_7_checkpoints",
        "expected_recovery_time": "3600s",
    },
    "performance_targets": {"throughput": "1000000 samples/sec", "checkpoint_overhead": "<5%"},
    "rdma_config": {"env_vars": {"NCCL_ALGO": "Tree"}},
    "coordinator_chunking": {"chunk_size": 10_000},
    "colour": "blue",
}


def test_s4_1_the_command_answers_the_file_that_states_it(tmp_path):
    (tmp_path / "asked.json").write_text(json.dumps(STATED))
    options = ("--contract", "004", "--set", "model.preset=llama-3-8b")
    done = run_command("plan", "asked.json", *options, folder=tmp_path)
    assert {row["key"] for row in json.loads(done.stdout)["stated"]} == set(answered(STATED))
    (tmp_path / "job.yaml").write_text(JOB)
    done = run_command("plan", "job.yaml", "--contract", "004", folder=tmp_path)
    assert "stated" not in json.loads(done.stdout)


def test_s4_1_what_a_given_plan_states_is_answered_or_named_with_the_reason():
    rows = answered(STATED)
    assert "checkpoint_strategy.frequency" not in rows
    assert "checkpoint_strategy.retention" not in rows
    assert "checkpoint.copy_to" in rows["checkpoint_strategy.storage"]["reason"]
    assert rows["checkpoint_strategy.async"]["stated"] is False
    assert rows["performance_targets.throughput"]["is_met"] is False
    assert rows["performance_targets.checkpoint_overhead"]["is_met"] is True
    assert rows["checkpoint_strategy.expected_recovery_time"]["is_met"] is True
    assert rows["rdma_config.env_vars.NCCL_ALGO"]["answer"] is None
    assert rows["coordinator_chunking.chunk_size"]["answer"] == 50_000
    assert "no such key" in rows["colour"]["reason"]
    assert all(row["reason"] for row in rows.values())


@pytest.mark.parametrize(
    ("key", "goal", "is_met"),
    [
        ("checkpoint_strategy.expected_recovery_time", "< 60 minutes", True),
        ("checkpoint_strategy.expected_recovery_time", "<1m 1s", False),
        ("checkpoint_strategy.expected_recovery_time", "at most 1h 30m per failure", True),
        ("checkpoint_strategy.expected_recovery_time", "soon", None),
        ("checkpoint_strategy.expected_recovery_time", "5-10 minutes", None),
        ("checkpoint_strategy.expected_recovery_time", 300, None),
        ("performance_targets.checkpoint_overhead", "5-10%", None),
        ("performance_targets.checkpoint_overhead", "2,5%", None),
        ("performance_targets.checkpoint_overhead", "5 minutes", None),
        ("performance_targets.throughput", "1000 samples/sec/gpu", None),
        ("performance_targets.throughput", "1,000,000 samples/sec", False),
    ],
)
def test_s4_1_a_goal_is_compared_or_named_with_how_to_write_it(key, goal, is_met):
    section, _, name = key.partition(".")
    plan = {each: STATED[each] for each in ("strategy", "batch_configuration")}
    row = answered(plan | {section: {name: goal}})[key]
    assert (row["stated"], row["is_met"]) == (goal, is_met)
    assert ("cannot be compared: write it like '" in row["reason"]) == (is_met is None)


def test_s4_1_a_storage_has_one_truth_in_answer_and_reason():
    row = answered(STATED, "engine=megatron")["checkpoint_strategy.storage"]
    assert row["answer"].endswith("which megatron does not copy to gs://reeds/x")
    assert "only Paceline's engine then copies" in row["reason"]


def test_s4_1_a_section_given_as_a_word_is_known():
    rows = answered(STATED | {"performance_targets": "fast"})
    assert rows["performance_targets"]["reason"].startswith("written for this plan")


def test_s4_1_what_set_changes_of_a_given_plan_is_named():
    rows = answered(STATED, "checkpoint.every=40", "cluster.nodes=4")
    assert rows["checkpoint_strategy.frequency"]["reason"] == "--set gives checkpoint.every"
    assert rows["strategy.total_gpus"]["reason"] == "--set gives cluster.nodes"


def test_s4_1_an_answer_that_is_read_again_states_what_it_answers():
    first = formatted("004", "train.steps=1000", "checkpoint.copy_to=s3://heron/c")
    rows = answered(first)
    assert not any(key.startswith(("checkpoint", "batch", "performance")) for key in rows)


def test_s4_17_a_chunk_that_one_step_overfills_has_the_size_of_the_step():
    chunks = formatted("004", "train.global_batch=60000", "train.steps=100")["coordinator_chunking"]
    assert (chunks["chunk_size"], chunks["num_chunks"]) == (60_000, 100)
    assert "60,000 samples, more than 50,000: no chunk is smaller" in chunks["reason"]


def test_s2_13_monitoring_names_the_program_whose_metrics_it_reads():
    assert formatted("002")["monitoringSetup"]["appliesTo"] == "`paceline run`"
    told = formatted("002", *MACS, "engine=mlx")["monitoringSetup"]["appliesTo"]
    assert told.startswith("MLX's example program")


@pytest.mark.parametrize("engine", ["mlx", "paceline"])
def test_s2_13_of_a_plan_that_mlx_runs_only_what_is_written_is_listed(engine):
    found = formatted("002", *MACS, f"engine={engine}")["monitoringSetup"]
    assert found["metrics"] == ["step", "loss"]
    nulls = {"alerts", "dashboardUrl", "dashboardCommand"}
    assert {name for name, value in found.items() if value is None} == nulls
    assert set(found["nullReasons"]) == nulls
    assert "nobody who judges it" in found["nullReasons"]["alerts"]
    asked = formatted("004", *MACS, f"engine={engine}")
    assert asked["pre_flight_checklist"]["alerts"] is None
    assert "pre_flight_checklist.alerts" in asked["null_reasons"]


PRINTED = {
    "deepspeed": '{"step": 7, "loss": 1.25}',
    "megatron": " iteration 7/ 9 | elapsed time per iteration (ms): 15.8 | learning rate: 8E-06 | "
    "lm loss: 6.2E+00 | loss scale: 1.0 | grad norm: 1.5 |",
    "torchtitan": "step:  7  loss:  7.6  grad_norm: 26.6  memory: 66.91GiB(37.51%)  tps: 10,050  "
    "tflops: 314.71  mfu: 13.99%",
}
"""A step as each program prints it: our examples by `lm_plain.say_step`, the others from logs."""


@pytest.mark.parametrize("engine", PRINTED)
def test_s2_13_metrics_of_an_engine_are_those_of_its_lines(engine):
    reader = Numbers(generation=1, num_ranks=16)
    first = PRINTED[engine].replace("7", "6", 1) + "\n"
    reader.feed(0, first.encode(), 1.0)
    (line,), _ = reader.feed(0, f"{PRINTED[engine]}\n".encode(), 2.0)
    unset = {"applied", "samples_digest", "logged", "not_finite"}  # `False`, empty or of scripts
    written = {name for name, value in asdict(line).items() if value is not None} - unset
    found = formatted("002", f"engine={engine}")["monitoringSetup"]
    assert set(found["metrics"]) | {"num_steps"} == written | {"num_steps"}
    judged = {row["metric"] for row in found["alerts"]}
    assert {"run/silence_s", "train/loss"} <= judged
    assert "memory/peak_bytes" not in judged  # thresholds of a plan, which such a run does not have
    assert not any(metric.startswith("event") for metric in judged)
    assert ("train/grad_norm" in judged) == ("grad_norm" in written)


def test_s2_13_alerts_of_the_job_are_listed_as_the_run_judges_them():
    own = "alerts={without: [slow], rules: [{name: hot, metric: loss, above: 9}]}"
    rows = formatted("002", own)["monitoringSetup"]["alerts"]
    conditions = [row["condition"] for row in rows]
    assert conditions[-1].startswith("train/loss > 9")
    assert not any("tokens_per_s" in each for each in conditions)


@pytest.mark.parametrize(
    ("given", "used", "said"),
    [
        ((), "ring", {"jaccl": "RDMA over Thunderbolt 5"}),
        (("cluster.mlx_backend=mpi",), "mpi", {"ring": "available: TCP"}),
        ((*RDMA,), "jaccl", {"jaccl-ring": "available"}),
        ((*RDMA, "cluster.nodes=8"), "jaccl-ring", {"jaccl": "8 Macs have too few ports"}),
    ],
)
def test_s2_6_of_a_plan_that_mlx_runs_its_own_backends_are_judged(given, used, said):
    found = formatted("002", *MACS, "engine=mlx", *given)["distributedConfig"]
    assert set(found["backends"]) == {"ring", "jaccl", "jaccl-ring", "mpi", "nccl"}
    assert found["backend"] == used
    assert found["backends"][used] == "used by this plan"
    for name, text in said.items():
        assert text in found["backends"][name]
    assert "NVIDIA GPUs alone" in found["backends"]["nccl"]
    for name, text in found["backends"].items():
        assert text.startswith(("used", "available", "not available: ")), name


def test_s2_6_mlx_on_cpu_ranks_is_no_plan_of_gloo():
    found = formatted("002", "engine=mlx", *CPUS)
    assert found["distributedConfig"]["backend"] == "ring"
    command = formatted("004", "engine=mlx", *CPUS)["distributed_config"]["mlx_launch_command"]
    assert command.startswith("mlx.launch ")
