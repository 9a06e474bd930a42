"""Jobs asked for in the two older JSON contracts."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.contracts.reading import Contract, contract_kind, load_contract, parse_contract
from paceline.errors import JobError, Problem

CONTEXT: dict[str, Any] = {
    "modelConfig": {"path": "llama-3-8b", "framework": "pytorch"},
    "dataConfig": {"path": "/data/*.txt", "size": "500GB", "sharding": "by file"},
    "clusterConfig": {"numNodes": 4, "gpusPerNode": 8, "networkBandwidth": "100Gbps"},
    "trainingConfig": {"batchSize": 512, "epochs": 2, "parallelismStrategy": "fsdp"},
}
DOCUMENT_PLAN: dict[str, Any] = {
    "strategy": {
        "approach": "MLX distributed with RDMA acceleration",
        "total_gpus": 8,
        "nodes": 2,
        "gpus_per_node": 4,
    },
    "batch_configuration": {
        "per_gpu_batch_size": 64,
        "total_batch_size": 512,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.004,
        "warmup_epochs": 5,
    },
    "distributed_config": {
        "mlx_launch_command": "mlx.launch --gpus 4 --nodes 2 train.py",
        "gradient_sync": "dist.all_reduce_grads()",
        "unified_memory": True,
    },
    "rdma_config": {
        "enabled": True,
        "network": "InfiniBand",
        "env_vars": {
            "NCCL_IB_DISABLE": "0",
            "NCCL_NET_GDR_LEVEL": "5",
            "NCCL_BUFFSIZE": "8388608",
        },
    },
    "checkpoint_strategy": {
        "compression": "gzip",
        "expected_recovery_time": "150s for 4800 devices",
    },
    "verification_steps": [
        "Check NCCL_DEBUG=INFO logs for 'Using network InfiniBand'",
        "Monitor GPU memory with mlx.metal.device_memory()",
    ],
}
"""The example of the contract, as it was published."""

MODEL = "model.preset=llama-3-8b"


def read(value: object, *overrides: str) -> Contract:
    return parse_contract(
        json.dumps(value), source="input.json", folder=Path("/nowhere"), overrides=overrides
    )


def changed(section: str, **values: object) -> dict[str, Any]:
    return {**CONTEXT, section: {**CONTEXT[section], **values}}


def without(section: str, key: str) -> dict[str, Any]:
    kept = {name: value for name, value in CONTEXT[section].items() if name != key}
    return {**CONTEXT, section: kept}


def problems(value: object, *overrides: str) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        read(value, *overrides)
    return list(caught.value.problems)


def test_an_input_context_becomes_a_job():
    contract = read(CONTEXT)
    spec = contract.job.spec
    assert contract.kind == "002"
    assert spec.model.preset == "llama-3-8b"
    assert (spec.cluster.nodes, spec.cluster.per_node) == (4, 8)
    assert spec.cluster.network == 12.5e9
    assert spec.train.global_batch == 512
    assert spec.layout.sharding == "full"
    assert spec.data.path == "/data/*.txt"


def test_epochs_and_the_size_of_the_data_become_steps():
    contract = read(CONTEXT)
    tokens = 2 * 500e9 / 4
    assert contract.job.spec.train.steps == pytest.approx(tokens / 4096 / 512, abs=1)
    assert any("(a guess)" in note for note in contract.notes)


def test_everything_that_is_assumed_is_said():
    notes = " ".join(read(CONTEXT).notes)
    for said in (
        "gpuType is missing: H100-SXM",
        "sequenceLength is missing",
        "sharding is by file",
    ):
        assert said in notes


@pytest.mark.parametrize(
    ("kind", "memory", "means"),
    [("A100", "80GB", "A100-80"), ("A100", "40 GB", "A100-40"), ("H100-SXM", "80GB", "H100-SXM")],
)
def test_the_memory_tells_which_card_a_name_means(kind, memory, means):
    context = json.loads(json.dumps(CONTEXT))
    context["clusterConfig"] |= {"gpuType": kind, "gpuMemory": memory}
    assert read(context).job.spec.cluster.accelerator == means


def test_what_the_contract_cannot_say_is_set_over_it():
    contract = read(CONTEXT, "cluster.accelerator=A100-80", "data.seq_len=2048", "train.steps=7")
    spec = contract.job.spec
    assert (spec.cluster.accelerator, spec.data.seq_len, spec.train.steps) == (
        "A100-80",
        2048,
        7,
    )
    assert "H100" not in " ".join(contract.notes)


@pytest.mark.parametrize(
    ("path", "way", "value"),
    [
        ("llama-3-8b", "preset", "llama-3-8b"),
        ("models/mine", "hf_config", "models/mine/config.json"),
        ("config.json", "hf_config", "config.json"),
    ],
)
def test_a_models_path_is_a_preset_a_folder_or_a_config(path: str, way: str, value: str):
    spec = read(changed("modelConfig", path=path)).job.spec
    assert getattr(spec.model, way) == value


def test_a_models_size_alone_is_enough():
    value = {
        "modelConfig": {"size": "7B", "framework": "pytorch"},
        "dataConfig": {"size": "500GB"},
        "clusterConfig": {"numNodes": 2, "gpusPerNode": 8, "networkBandwidth": "100Gbps"},
    }
    spec = read(value).job.spec
    assert spec.model.size == 7_000_000_000
    assert spec.train.global_batch % 16 == 0


def test_a_key_that_is_near_to_none_has_all_that_are_known():
    (problem,) = problems(changed("modelConfig", parameters="7B"))
    assert problem.fix == "known keys are path, size, framework"


def test_an_unknown_key_names_the_nearest_one():
    (problem,) = problems(changed("clusterConfig", numNode=3))
    assert problem.code == "J021"
    assert problem.fix == "did you mean `numNodes`?"
    assert problem.where == "clusterConfig.numNode, input.json"


def test_every_missing_section_is_named_at_once():
    found = problems({"trainingConfig": {"batchSize": 8}})
    assert [problem.where for problem in found] == [
        "modelConfig, input.json",
        "dataConfig, input.json",
        "clusterConfig, input.json",
        "modelConfig, input.json",
    ]


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("clusterConfig", "networkBandwidth", "fast", "is not a bandwidth"),
        ("clusterConfig", "networkBandwidth", "0Gbps", "above zero"),
        ("dataConfig", "size", "1e999GB", "is no finite number"),
        ("dataConfig", "size", "500", "no unit of bytes"),
        ("clusterConfig", "numNodes", "four", "must be a whole number"),
        ("clusterConfig", "numNodes", 0, "must be above zero"),
        ("clusterConfig", "gpusPerNode", True, "must be a whole number"),
        ("trainingConfig", "parallelismStrategy", "magic", "which is not known"),
        ("modelConfig", "framework", ["a"], "must be text"),
    ],
)
def test_a_wrong_value_is_refused_in_the_contracts_own_words(section, key, value, said):
    (problem,) = problems(changed(section, **{key: value}))
    assert problem.code == "J022"
    assert said in problem.what
    assert problem.where == f"{section}.{key}, input.json"


def test_a_section_that_is_a_list_is_refused():
    (problem,) = problems({**CONTEXT, "dataConfig": []})
    assert "section with keys" in problem.fix


@pytest.mark.parametrize(
    ("asked", "sharding"), [("ddp", "none"), ("data-parallelism", "auto"), ("FSDP", "full")]
)
def test_a_strategy_fixes_what_it_names(asked: str, sharding: str):
    spec = read(changed("trainingConfig", parallelismStrategy=asked)).job.spec
    assert spec.layout.sharding == sharding


@pytest.mark.parametrize(
    ("asked", "tensor", "pipeline"),
    [
        ("tensor-parallelism", 8, 1),
        ("Pipeline_Parallelism", 1, 4),
        ("hybrid-3d-parallelism", 8, 4),
        ("zero3", 1, 1),
        ("fsdp", 1, 1),
    ],
)
def test_s2_1_the_strategy_that_is_asked_for_is_the_one_that_is_planned(asked, tensor, pipeline):
    contract = read(changed("trainingConfig", parallelismStrategy=asked))
    layout = contract.job.spec.layout
    assert (layout.tensor, layout.pipeline) == (tensor, pipeline)
    has_note = any("names no degrees" in note for note in contract.notes)
    assert has_note == (tensor > 1 or pipeline > 1)


@pytest.mark.parametrize(
    "asked", ["DiLoCo", "local SGD", "parameter-server", "asynchronous SGD", "decentralized-sgd"]
)
def test_s2_7_algorithms_that_nothing_here_runs_are_refused_with_the_reason(asked):
    (problem,) = problems(changed("trainingConfig", parallelismStrategy=asked))
    assert "is not available: " in problem.what
    assert "choose one of auto, data, ddp" in problem.fix


@pytest.mark.parametrize("path", ["/models/llama-7b", "org/llama", "models/config.json"])
def test_s2_1_a_model_that_is_not_on_this_machine_is_planned_by_its_size(path):
    contract = read(changed("modelConfig", path=path, size="7B"))
    assert contract.job.spec.model.size == 7_000_000_000
    assert any(f"{path} is not on this machine" in note for note in contract.notes)
    assert read(changed("modelConfig", size="7B")).job.spec.model.preset == "llama-3-8b"


def test_s2_1_a_size_that_is_not_the_models_at_the_path_is_named_and_one_that_is_says_nothing():
    (finding,) = read(changed("modelConfig", path="llama-3-8b", size="70B")).findings
    assert finding.code == "J023"
    assert "size is 70B, and the model of modelConfig.path llama-3-8b has 8.03B" in finding.what
    same = read(changed("modelConfig", path="llama-3-8b", size="8B"))
    assert not same.findings
    assert not any("modelConfig" in note for note in same.notes)
    (problem,) = problems(changed("modelConfig", path="llama-3-8b", size="banana"))
    assert problem.where.startswith("modelConfig.size")


def test_a_missing_batch_is_a_multiple_of_the_ranks():
    contract = read(without("trainingConfig", "batchSize"))
    assert contract.job.spec.train.global_batch % 32 == 0


def test_a_training_plan_needs_a_model_from_outside():
    (problem,) = problems(DOCUMENT_PLAN)
    assert "--set model.preset" in problem.fix
    assert read(DOCUMENT_PLAN, MODEL).job.spec.model.preset == "llama-3-8b"


def test_a_training_plans_cluster_and_batch_are_taken_over():
    spec = read(DOCUMENT_PLAN, MODEL).job.spec
    assert (spec.cluster.nodes, spec.cluster.per_node, spec.train.global_batch) == (2, 4, 512)
    assert spec.train.learning_rate == 0.004


def test_the_published_example_is_told_all_that_is_wrong_in_it():
    findings = read(DOCUMENT_PLAN, MODEL).findings
    said = "\n".join(str(finding) for finding in findings)
    assert {finding.code for finding in findings} == {"J023"}
    for wrong in (
        "0.004 is the linear rate of 256 samples",
        "mlx.launch has no --gpus",
        "no all_reduce_grads",
        "no mlx.metal.device_memory",
        "`Using network IB`",
        "legacy number",
        "gzip",
        "neither NCCL nor InfiniBand",
        "arXiv:2509.03047",
    ):
        assert wrong in said
    assert "total_gpus" not in said


def test_sums_that_do_not_add_up_are_named_with_the_right_ones():
    value = {
        **DOCUMENT_PLAN,
        "strategy": {"nodes": 2, "gpus_per_node": 4, "total_gpus": 16},
        "batch_configuration": {
            "per_gpu_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "total_batch_size": 64,
        },
    }
    said = "\n".join(str(finding) for finding in read(value, MODEL).findings)
    assert "2 nodes x 4 GPUs is 8, total_gpus says 16" in said
    assert "4 a GPU x 4 accumulated x 8 GPUs is 128, total_batch_size says 64" in said


def test_a_contract_is_known_by_its_keys(tmp_path: Path):
    assert contract_kind(CONTEXT) == "002"
    assert contract_kind(DOCUMENT_PLAN) == "004"
    assert contract_kind({"model": {}, "train": {}}) is None
    path = tmp_path / "input.json"
    path.write_text(json.dumps(CONTEXT))
    contract = load_contract(path)
    assert contract is not None
    assert contract.job.folder == tmp_path


@pytest.mark.parametrize("text", ["", "{", "[]", "model: {preset: x}", "\udcff", "[" * 100_000])
def test_what_is_no_contract_is_left_to_the_job_reader(tmp_path: Path, text: str):
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert load_contract(path) is None
    assert load_contract(tmp_path / "nothing.json") is None


def test_json_of_another_program_is_neither_a_contract_nor_a_job(tmp_path: Path):
    path = tmp_path / "alien.json"
    path.write_text('{"model_config": {"size": "7B"}, "nodes": 4}')
    with pytest.raises(JobError, match=r"neither a job nor one of the two .* model_config, nodes"):
        load_contract(path)
    path.write_text('{"model": {"preset": "gpt2"}, "modle": 1}')
    assert load_contract(path) is None


@pytest.mark.parametrize("value", [10**400, 10**16, float("inf"), float("nan"), "\x00", [], {}])
def test_s4_21_absurd_numbers_never_show_a_traceback(value: object):
    for key in ("batchSize", "epochs", "learningRate"):
        assert problems(changed("trainingConfig", **{key: value}))
    plan = {**DOCUMENT_PLAN, "batch_configuration": {"total_batch_size": value}}
    assert problems(plan, MODEL)


def stating(**sections: dict[str, Any]) -> dict[str, Any]:
    plan = {key: DOCUMENT_PLAN[key] for key in ("strategy", "batch_configuration")}
    return plan | sections


def test_s4_1_what_a_training_plan_states_of_checkpoints_becomes_settings():
    asked = {
        "storage": "gs://reeds/x",
        "retention": "last_7_checkpoints",
        "frequency": "every_250_steps",
        "compression": "none",
        "async": False,
    }
    contract = read(stating(checkpoint_strategy=asked), MODEL)
    keep = contract.job.spec.checkpoint
    assert (keep.every, keep.keep_last, keep.copy_to) == (250, 7, "gs://reeds/x")
    assert (keep.copy_keep, keep.compress) == (7, "never")
    assert any("checkpoint_strategy.async false is no setting" in note for note in contract.notes)
    shared = read(stating(checkpoint_strategy={"storage": "/mnt/nas/runs"}), MODEL)
    assert shared.job.spec.checkpoint.copy_to == "file:///mnt/nas/runs"


@pytest.mark.parametrize(
    ("storage", "copy_to"),
    [
        ("s3://b/ckpt, hourly", "s3://b/ckpt"),
        ("copies (gs://b/ckpt).", "gs://b/ckpt"),
        ("simplecache::file:///mnt/a.b/c", "simplecache::file:///mnt/a.b/c"),
        ("/mnt/my nas/runs, hourly", "file:///mnt/my nas/runs"),
        ("/mnt/nas/runs (NFS)", "file:///mnt/nas/runs"),
        ("/mnt/v1.2/runs.", "file:///mnt/v1.2/runs"),
    ],
)
def test_s4_1_words_around_a_storage_are_no_part_of_its_place(storage, copy_to):
    contract = read(stating(checkpoint_strategy={"storage": storage}), MODEL)
    assert contract.job.spec.checkpoint.copy_to == copy_to


def test_s4_1_a_storage_promises_copies_of_no_engine_that_makes_none():
    asked = {"storage": "s3://b/ckpt"}
    (note,) = (
        note
        for note in read(stating(checkpoint_strategy=asked), MODEL, "engine=megatron").notes
        if "s3://b/ckpt" in note
    )
    assert note.endswith("only Paceline's engine then copies each checkpoint there")


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("checkpoint_strategy", "frequency", "often", "write every_250_steps"),
        ("checkpoint_strategy", "frequency", "every_0_steps", "write every_250_steps"),
        ("checkpoint_strategy", "retention", "the best", "write last_3_checkpoints"),
        ("checkpoint_strategy", "retention", 3, "write text"),
    ],
)
def test_s4_1_a_checkpoint_setting_that_cannot_be_read_is_refused(section, key, value, said):
    (problem,) = problems(stating(**{section: {key: value}}), MODEL)
    assert problem.where.startswith(f"{section}.{key}")
    assert problem.fix == said


@pytest.mark.parametrize("text", ["every_epoch", "every_2_epochs"])
def test_s4_1_checkpoints_by_epochs_are_named_and_not_used(text):
    contract = read(stating(checkpoint_strategy={"frequency": text}), MODEL)
    assert contract.job.spec.checkpoint.every == "auto"
    assert any(f"{text!r} is not used: how long an epoch is" in note for note in contract.notes)


def test_s4_1_a_batch_below_one_is_not_said_to_be_missing_too():
    (problem,) = problems({**DOCUMENT_PLAN, "batch_configuration": {"total_batch_size": -3}}, MODEL)
    assert "must be above zero" in problem.what


def test_s4_1_commands_for_a_job_have_its_file_and_what_was_set():
    job = read(DOCUMENT_PLAN, MODEL, "train.steps=7", "train.steps=9", "data.path=a b").job
    assert job.words.endswith("--set train.steps=9 --set 'data.path=a b'")
    assert "train.steps=7" not in job.words
