"""`paceline calibrate`: a few seconds on real ranks, and what planning then reads."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.catalog import load_catalog
from paceline.catalog.efficiencies import load_efficiencies, with_measured
from paceline.catalog.engines import load_engines
from paceline.cli import cli
from paceline.errors import JobError
from paceline.estimate.rates import rates_of
from paceline.launch.calibrate import Place, find_own_cluster, find_place, measure_machine
from paceline.topology import FoundGpu
from paceline.topology import machine as machine_module

HERE = Place(rank=None, num_nodes=1, ranks_per_node=2)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "find_gpus", lambda looks: ("", (), None))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.ranks
def test_what_is_measured_here_is_what_planning_reads(tmp_path: Path):
    out = tmp_path / "paceline-catalog.toml"
    out.write_text("# Ours.\n[accelerators.H100-SXM]\nnum_per_node = 4\n")
    asked = ["calibrate", "--seconds", "8", "--ranks", "2", "--out", str(out), "--json"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    measured, fitted = data["measured"], data["fitted"]
    assert (measured["num_ranks"], measured["device"]) == (2, "cpu")
    assert {each["precision"] for each in measured["products"]} >= {"fp32"}
    assert measured["memory"]
    assert measured["collectives"]
    assert "calibrate: products in fp32" in result.stderr
    assert f"wrote [efficiencies.cpu] to {out}" in result.stderr

    catalog = load_catalog(out)
    assert out.read_text().startswith("# Ours.\n[accelerators.H100-SXM]\nnum_per_node = 4\n")
    assert catalog.efficiencies["cpu"]["matmul"] == fitted["row"]["matmul"]
    assert catalog.efficiencies["cpu"]["source"].startswith("measured by paceline calibrate, 20")
    cluster = find_own_cluster(HERE, tmp_path, catalog)
    shipped = load_efficiencies()
    ours = with_measured(shipped, catalog.efficiencies, accelerator="cpu")
    engine = load_engines()["paceline"]
    before, after = (rates_of(cluster, engine, "fp32", each) for each in (shipped, ours))
    share = fitted["row"]["matmul"]["fp32"]["share"]
    assert after.matmul.flops_per_s == pytest.approx(share * cluster.peak_flops_per_s["fp32"])
    assert after.matmul.flops_per_s != before.matmul.flops_per_s
    assert after.memory_bytes_per_s != before.memory_bytes_per_s


@pytest.mark.repeat  # the ranks of torchrun are told in the last test
@pytest.mark.ranks
def test_under_torchrun_rank_0_alone_writes_and_prints(tmp_path: Path):
    out = tmp_path / "ours.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "paceline", "calibrate", "--seconds", "3", "--out", str(out)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WHAT ") == 1
    source = tomllib.loads(out.read_text())["efficiencies"]["cpu"]["source"]
    assert "2 ranks" in source


def test_a_table_written_by_hand_is_refused_before_anything_is_measured(tmp_path: Path):
    out = tmp_path / "ours.toml"
    out.write_text("[efficiencies.cpu]\nmemory_share = 0.5\n")
    with pytest.raises(JobError, match="T016"):
        cli.main(["calibrate", "--out", str(out)], standalone_mode=False)
    assert out.read_text() == "[efficiencies.cpu]\nmemory_share = 0.5\n"


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path):
    with pytest.raises(JobError, match="T016"):
        cli.main(["calibrate", "--out", str(tmp_path / "no" / "f.toml")], standalone_mode=False)


def test_a_rank_that_fails_says_why(tmp_path: Path):
    cluster = replace(find_own_cluster(HERE, tmp_path, load_catalog(None)), backend="nccl")
    with pytest.raises(JobError, match=r"T017: rank \d failed: .*(CUDA|cuda|HIP|NVIDIA)"):
        measure_machine(cluster, HERE, seconds=2)


def test_a_gpu_without_known_peaks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpu = FoundGpu(name="NVIDIA Unheard-of 9000", memory_bytes=2**34)
    monkeypatch.setattr(machine_module, "find_gpus", lambda looks: ("", (gpu,), None))
    with pytest.raises(JobError, match=r"T018: .*Unheard-of"):
        find_own_cluster(HERE, tmp_path, load_catalog(None))


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpu = FoundGpu(name="NVIDIA H200", memory_bytes=2**37)
    monkeypatch.setattr(machine_module, "find_gpus", lambda looks: ("", (gpu,), None))
    with pytest.raises(JobError, match="T002: 2 ranks were asked for, this machine has 1 GPU"):
        find_own_cluster(HERE, tmp_path, load_catalog(None))


def test_several_machines_are_as_torchrun_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpus = tuple(FoundGpu(name="NVIDIA H200", memory_bytes=2**37) for _ in range(8))
    monkeypatch.setattr(machine_module, "find_gpus", lambda looks: ("", gpus, None))
    place = find_place({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, None)
    cluster = find_own_cluster(place, tmp_path, load_catalog(None))
    assert (cluster.accelerator, cluster.num_nodes, cluster.ranks_per_node) == ("H200", 2, 8)
    assert not cluster.is_local
