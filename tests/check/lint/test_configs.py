"""Configurations with planted faults are found, on their line; correct ones give nothing."""

from pathlib import Path

import pytest
from tests.check.lint.marked_cases import cases_in

from paceline.check.finding import Severity
from paceline.check.lint.configs import check_config, read_config
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint_files

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "render" / "golden"


def findings(path, text, context):
    config = read_config(str(path), text)
    return list(check_config(config, context)) if config is not None else []


def is_code(case):
    return case.path.suffix == ".py"


@pytest.mark.parametrize(
    "case", [one for one in cases_in("planted") if not is_code(one)], ids=lambda one: one.path.name
)
def test_a_planted_fault_is_found_on_its_line_and_nothing_else_is(case):
    found = findings(case.path, case.text, case.context)
    said = {(one.id, one.where.line) for one in found}
    loud = {(one.id, one.where.line) for one in found if one.severity is not Severity.INFO}
    assert case.wanted, "a planted case says what is in it"
    assert case.wanted <= said
    assert loud <= case.wanted


@pytest.mark.parametrize(
    "case", [one for one in cases_in("correct") if not is_code(one)], ids=lambda one: one.path.name
)
def test_a_correct_configuration_gives_no_warning(case):
    loud = [
        (one.id, one.where.line, one.what)
        for one in findings(case.path, case.text, case.context)
        if one.severity is not Severity.INFO
    ]
    assert loud == []


@pytest.mark.parametrize(
    ("setting", "id"),
    [
        ("NCCL_NTHREADS=4", "debugging-left-on"),
        ("NCCL_NET_GDR_LEVEL=5", "nccl-env-deprecated"),
        ("NCCL_P2P_LEVEL=5", "nccl-env-deprecated"),
        ("NCCL_BUFFSIZE=8388608", "debugging-left-on"),
        ("NCCL_NET_GDR_READ=0", "gdr-peermem-missing"),
        ("NCCL_NTHREADS=256", None),
        ("NCCL_NET_GDR_LEVEL=PHB", None),
        ("NCCL_P2P_LEVEL=NVL", None),
        ("NCCL_BUFFSIZE=4194304", None),
        ("NCCL_BUFFSIZE=$SIZE", None),
        ("NCCL_ALGO=Rnig", "nccl-env-deprecated"),
        ("NCCL_PROTO=LL,LL129", "nccl-env-deprecated"),
        ("NCCL_DEBUG=INFOO", "nccl-env-deprecated"),
        ("NCCL_ALGO='allreduce:tree,ring;broadcast:^NVLS'", "debugging-left-on"),
        ("NCCL_ALGO=Ring", "debugging-left-on"),
        ("NCCL_PROTO=LL", "debugging-left-on"),
        ("NCCL_SHM_DISABLE=1", "debugging-left-on"),
        ("TORCH_NCCL_BLOCKING_WAIT=1", "debugging-left-on"),
        ("MLX_METAL_FAST_SYNCH=1", "debugging-left-on"),
        ("MLX_METAL_FAST_SYNCH=0", None),
        ("NCCL_PROTO=^LL128", None),
        ("NCCL_DEBUG=info", None),
        ("NCCL_DEBUG=OFF", None),
        ("NCCL_ALGO=$ALGO", None),
        ("NCCL_DEBUG=TRACE", "nccl-env-deprecated"),
        ("NCCL_BUFFSIZE=8M", "nccl-env-deprecated"),
        ("NCCL_IB_DISABLE=true", "nccl-env-deprecated"),
        ("NCCL_IB_DISABLE=false", None),
        ("NCCL_P2P_LEVEL=sys", "nccl-env-deprecated"),
        ("NCCL_IB_HCA=mlx5_1", "nccl-env-deprecated"),
        ("NCCL_IB_HCA=mlx5_1:1", "nccl-env-deprecated"),
        ("NCCL_IB_HCA==mlx5_1,=mlx5_2", "nccl-env-deprecated"),
        ("NCCL_IB_HCA==mlx5_1:1,mlx5_2:1", None),
        ("NCCL_IB_HCA=^=mlx5_1,mlx5_4", None),
        ("NCCL_IB_HCA=mlx5", None),
        ("NCCL_IB_HCA=mlx5_0", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "debugging-left-on"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=3", None),
    ],
)
def test_s4_5_a_setting_that_nccl_finds_better_itself_or_does_not_know_is_named(setting, id):
    text = f"#!/bin/bash\nexport {setting}\nsrun torchrun --nproc-per-node 8 train.py\n"
    found = [one for one in findings("job.sh", text, Context()) if one.where.line == 2]
    assert [one.id for one in found] == ([id] if id else [])


def test_the_default_of_a_variable_is_read_without_its_quotes():
    text = '#!/bin/bash\nexport NCCL_IB_DISABLE=${IB_OFF:-"1"}\n'
    (found,) = findings("job.sh", text, Context())
    assert found.what.startswith("NCCL_IB_DISABLE=1: ")


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [
        ("FULL_SHARD", "fsdp_reshard_after_forward: true"),
        ("2", "fsdp_reshard_after_forward: false"),
        ("NO_SHARD", "distributed_type: MULTI_GPU, which is DDP: FSDP2 always shards"),
        ("HYBRID_SHARD", "parallelism_config_dp_replicate_size (nodes)"),
        ("5", "fsdp_reshard_after_forward: false, and parallelism_config"),
    ],
)
def test_s3_2_a_strategy_of_fsdp1_is_replaced_by_what_does_the_same_under_fsdp2(strategy, instead):
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
        f"fsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: {strategy}\n"
    )
    (found,) = findings("acc.yaml", text, Context())
    assert instead in found.fix


def test_what_paceline_renders_gives_no_warning():
    jobs = [folder for folder in GOLDEN.glob("*/*") if folder.is_dir()]
    assert jobs
    for folder in jobs:
        files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        linted = lint_files(files, Context())
        assert linted.unread == []
        loud = [one for one in linted.findings if one.severity is not Severity.INFO]
        assert [(one.id, str(one.where), one.what) for one in loud] == []


def test_a_batch_size_of_deepspeed_that_is_no_number_is_named():
    text = '{"train_batch_size": "all", "zero_optimization": {"stage": "full"}}'
    found = findings("ds.json", text, Context())
    assert [one.what.partition(",")[0] for one in found] == [
        "train_batch_size is all: it has to be a whole number from 1 on",
        "stage is full",
    ]
    assert {one.id for one in found} == {"ds-config-silent-keys"}


@pytest.mark.parametrize(
    ("entry", "what", "fix"),
    [
        (
            '"train_batch_size": 9223372036854775808000000',
            (
                "train_batch_size is 9223372036854775808000000: "
                "it has to be a whole number of at most 9223372036854775807"
            ),
            "write a whole number of at most 9223372036854775807",
        ),
        (
            '"optimizer": {"params": {"lr": "1e-3"}}',
            'lr is the text "1e-3": it has to be a number from 0 on',
            "lr: 1e-3, without quotes",
        ),
        (
            '"gradient_clipping": "one"',
            "gradient_clipping is one: it has to be a number",
            "write a number",
        ),
    ],
)
def test_what_a_value_of_deepspeed_has_to_be_is_said_with_its_fix(entry, what, fix):
    text = '{"wall_clock_breakdown": false, "zero_optimization": {"stage": 2}, ' + entry + "}"
    (found,) = findings("ds.json", text, Context())
    assert (found.what, found.fix) == (what, fix)
