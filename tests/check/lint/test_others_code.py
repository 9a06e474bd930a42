"""What was wrong in code of others (benchmarks/data/lint_judgements.csv) is found no more."""

from textwrap import dedent

import pytest

from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint


def levels(id: str, **files: str) -> list[str]:
    """Levels of one failure's findings in files, by names in which `_` stands before the ending."""
    named = {name.replace("__", "."): dedent(text).encode() for name, text in files.items()}
    return [str(one.severity) for one in lint(named, Context()) if one.id == id]


@pytest.mark.parametrize(("size", "expected"), [("world_size=1, ", []), ("", ["info"])])
def test_a_group_of_one_process_writes_its_file_alone(size, expected):
    program = f"""
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", {size}rank=0)
    torch.save({{}}, "out.pt")
    """
    assert levels("all-ranks-save-same-file", train__py=program) == expected


def test_a_file_in_memory_is_each_process_s_own():
    program = """
    import io
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    held = io.BytesIO()
    torch.save({}, held)
    """
    assert levels("all-ranks-save-same-file", train__py=program) == []


SAVES_ARGUMENTS = """
    import argparse
    import torch
    import torch.distributed as dist
    args = argparse.ArgumentParser().parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "args": args}, "last.pt")
    torch.load("last.pt")
    """


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("environment__yml", "dependencies:\n  - pytorch=1.12.1\n  - pip", []),
        ("environment__yml", "dependencies:\n  - numpy=1.22", ["warning"]),
        ("Dockerfile", "FROM pytorch/pytorch:1.9.0-cuda11.1-cudnn8-devel\n", []),
        ("Dockerfile", "FROM ubuntu\nRUN pip install torch==2.0.1\n", []),
        ("Dockerfile", "FROM pytorch/pytorch:2.7.1-cuda12.8\n", ["warning"]),
    ],
)
def test_a_fault_of_a_newer_torch_than_the_folder_installs_is_none(name, text, expected):
    files = {name: text, "train__py": SAVES_ARGUMENTS}
    assert levels("weights-only-load", **files) == expected


def test_a_requirement_that_allows_every_torch_counts_before_an_image():
    files = {"Dockerfile": "FROM pytorch/pytorch:1.9.0\n", "requirements__txt": "torch>=1.5\n"}
    assert levels("weights-only-load", train__py=SAVES_ARGUMENTS, **files) == ["warning"]


@pytest.mark.parametrize(
    ("setup", "sub", "expected"),
    [
        ("torch==1.8", "numpy", []),
        ("torch==1.8", "torch", ["warning"]),
        ("torch-geometric==1.8", "numpy", ["warning"]),
    ],
)
def test_versions_are_read_in_other_folders_where_no_file_around_names_the_package(
    setup, sub, expected
):
    files = {
        "setup/pip-requirements__txt": setup,
        "sub/requirements__txt": sub,
        "code/train__py": SAVES_ARGUMENTS,
    }
    assert levels("weights-only-load", **files) == expected


@pytest.mark.parametrize(
    ("saved", "expected"), [("model", []), ('{"state": model, "epoch": 1}', ["warning"])]
)
def test_a_state_that_is_loaded_was_not_saved_as_the_model_itself(saved, expected):
    program = f"""
    import sys
    import torch
    model = torch.nn.Linear(2, 2)
    torch.save({saved}, "whole.pt")
    last = torch.load(sys.argv[1])
    model.load_state_dict(last["state"])
    """
    assert levels("weights-only-load", train__py=program) == expected


@pytest.mark.parametrize(("version", "expected"), [("0.6.5", []), ("0.7.0", ["error"])])
def test_keys_that_an_old_deepspeed_passes_over_end_no_start(version, expected):
    files = {
        "setup/requirements__txt": f"deepspeed=={version}",
        "conf/zero__json": '{"zero_optimization": {"stage": 3, "cpu_offload_params": true}}',
    }
    assert levels("ds-config-silent-keys", **files) == expected


def test_a_shell_takes_the_quotes_from_the_default_of_a_variable():
    for level, expected in (("INFO", []), ("INFOO", ["warning"])):
        text = f'LEVEL=${{LEVEL:-"{level}"}}\nNCCL_DEBUG=$LEVEL torchrun train.py\n'
        assert levels("nccl-env-deprecated", run__sh=text) == expected


READS = """
    from torch.utils.data import DataLoader, DistributedSampler
    def read(data, model, optimizer):
        loader = DataLoader(data, sampler=DistributedSampler(data))
        for epoch in range(3):
            for batch in loader:
                {use}
    """


def test_the_order_of_batches_matters_where_they_train_and_is_a_hint_elsewhere():
    trains = READS.format(use="model(batch).sum().backward(); optimizer.step()")
    assert levels("set-epoch-missing", train__py=trains) == ["warning"]
    for use in ("score(model(batch))", "model(batch).sum().backward()"):
        scores = READS.format(use=use)
        assert levels("set-epoch-missing", train__py=scores) == ["info"]
