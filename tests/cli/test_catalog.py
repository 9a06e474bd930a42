"""`paceline catalog` and `paceline detect`, called as a person calls them."""

import json
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from paceline.cli import cli
from paceline.errors import JobError


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def refused(*arguments: str) -> str:
    with pytest.raises(JobError) as caught:
        cli.main(list(arguments), standalone_mode=False)
    return str(caught.value)


def test_the_catalog_says_how_much_there_is():
    result = call("catalog")
    assert result.exit_code == 0
    assert result.output.startswith("accelerators  64\n")


@pytest.mark.parametrize("kind", ["accelerators", "links", "prices", "models"])
def test_every_kind_is_a_table_and_json(kind: str):
    table = call("catalog", kind)
    assert table.exit_code == 0, table.output
    rows = json.loads(call("catalog", kind, "--json").output)
    assert isinstance(rows, list)
    assert len(rows) > 5


def test_one_accelerator_shows_its_numbers_and_their_sources():
    output = call("catalog", "accelerators", "h100").output
    assert "peak fp8             1.98 PFLOP/s, dense" in output
    assert "NVIDIA H100 data sheet and architecture white paper" in output
    assert "as of" in output


def test_prices_of_an_accelerator_come_cheapest_first_with_date_and_source():
    lines = call("catalog", "prices", "H100-SXM").output.splitlines()
    dollars = [float(line.split()[0]) for line in lines[1:-2]]
    assert dollars == sorted(dollars)
    assert "2026-09-06" in "\n".join(lines)
    first = json.loads(call("catalog", "prices", "H100-SXM", "--json").output)[0]
    assert first["source"].startswith("skypilot-org/skypilot-catalog@")
    assert first["per_accelerator_hour_usd"] == pytest.approx(dollars[0], abs=0.005)


def test_one_link_and_one_model_show_every_field():
    assert "collective_share     0.75" in call("catalog", "links", "nvlink-4").output
    assert "num_hidden_layers    126" in call("catalog", "models", "llama-3-405b").output


def test_an_accelerator_without_a_price_says_how_to_add_one():
    assert "no price of M4-Max" in call("catalog", "prices", "m4 max").output


def test_unknown_names_come_with_the_nearest():
    assert "did you mean `H100-SXM`" in refused("catalog", "accelerators", "h100-smx")
    assert "did you mean `nvlink-4`" in refused("catalog", "links", "nvlink4")
    assert "Did you mean `prices`?" in call("catalog", "prise").output


def test_the_file_that_is_written_passes_its_own_check(tmp_path: Path):
    path = tmp_path / "paceline-catalog.toml"
    assert call("catalog", "--write", str(path)).exit_code == 0
    output = call("catalog", "--file", str(path)).output
    assert "no problem found" in output
    assert "accelerators.H100-SXM-96" in output
    assert "T014" in refused("catalog", "--write", str(path))
    assert call("catalog", "--write", str(path), "--force").exit_code == 0
    assert "T014: - is not the name of a file" in refused("catalog", "--write", "-", "--force")


def test_a_file_that_is_wrong_shows_every_problem(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text("[accelerators.L4]\nfoo = 1\nnum_per_node = 0\n")
    said = refused("catalog", "--file", str(path))
    assert "T011" in said
    assert "T013" in said


def test_what_a_file_changes_is_marked(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text("[accelerators.L4]\nnum_per_node = 4\n")
    assert "L4*" in call("catalog", "accelerators", "--file", str(path)).output


def test_detect_prints_a_section_that_yaml_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    result = call("detect")
    assert result.exit_code == 0
    section = yaml.safe_load(result.output.partition("# Found by")[2].partition("\n")[2])
    assert section["cluster"]["nodes"] == 1


def test_detect_writes_its_section_and_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    path = tmp_path / "cluster.yaml"
    assert call("detect", "--write", str(path)).exit_code == 0
    section = yaml.safe_load(path.read_text())["cluster"]
    assert json.loads(call("detect", "--json").output)["cluster"] == section
    assert "T014" in refused("detect", "--write", str(path))


def test_detect_into_a_folder_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert "T014" in refused("detect", "--write", "/nowhere/at/all.yaml")


@pytest.mark.parametrize("words", [("--set", "steps=5"), ("--set", "ssh.port=2222")])
def test_detect_refuses_a_setting_that_has_no_effect_on_this_machine(words: tuple[str, ...]):
    with pytest.raises(click.UsageError, match=f"{words[1]} does nothing with --on local"):
        cli.main(["detect", *words], standalone_mode=False)


def test_detect_says_that_a_run_cannot_be_written_into_a_file(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.touch()
    said = " ".join(call("detect", "--folder", str(path)).output.split())
    assert f"not writable: {path} is no folder" in said
