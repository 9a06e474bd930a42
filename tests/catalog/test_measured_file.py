"""What calibrate writes stands beside what a person wrote, and replaces only itself."""

import tomllib
from pathlib import Path

import pytest

from paceline.catalog import load_catalog
from paceline.catalog.measured_file import format_measured, merge_measured, write_measured
from paceline.errors import JobError

ROW = {"source": 'measured "here"', "memory_share": 0.8, "matmul": {"fp32": {"share": 1.1}}}
HAND = """\
# Ours.
[efficiencies.cpu]
memory_share = 0.5   # by hand

[efficiencies.cpu.matmul.fp32]
share = 0.4

# The racks.
[accelerators.H100-SXM]
num_per_node = 4
"""


def test_a_new_file_loads_with_the_measured_numbers(tmp_path: Path):
    path = tmp_path / "paceline-catalog.toml"
    write_measured(path, "cpu", ROW, ["one", "two"], force=False)
    assert load_catalog(path).efficiencies == {"cpu": ROW}
    assert "# one\n# two\n" in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_other_tables_and_comments_of_a_file_stay(tmp_path: Path):
    path = tmp_path / "our.toml"
    before = "# Racks of 4.\n[accelerators.H100-SXM]\nnum_per_node = 4  # four\n"
    path.write_text(before)
    write_measured(path, "cpu", ROW, [], force=False)
    assert path.read_text().startswith(before)
    assert load_catalog(path).accelerators["H100-SXM"].num_per_node == 4


def test_a_second_calibration_replaces_the_first_where_it_stands():
    first = merge_measured("# a\n", "cpu", format_measured("cpu", ROW, ["old"]), force=False)
    first += "\n# b\n[links.loopback]\nlatency_s = 1e-6\n"
    other = format_measured("cpu", {"memory_share": 0.9}, ["new"])
    second = merge_measured(first, "cpu", other, force=False)
    assert "old" not in second
    assert second.index("# a") < second.index("# new") < second.index("# b")
    assert tomllib.loads(second)["efficiencies"] == {"cpu": {"memory_share": 0.9}}
    assert merge_measured(second, "cpu", other, force=False) == second


def test_a_table_written_by_hand_is_replaced_only_when_asked(tmp_path: Path):
    path = tmp_path / "our.toml"
    path.write_text(HAND)
    with pytest.raises(JobError, match=r"T016: .*\[efficiencies\.cpu\] is there") as caught:
        write_measured(path, "cpu", ROW, [], force=False)
    assert "--force" in caught.value.problems[0].fix
    assert path.read_text() == HAND
    write_measured(path, "cpu", ROW, [], force=True)
    assert load_catalog(path).efficiencies == {"cpu": ROW}
    assert "# The racks.\n[accelerators.H100-SXM]\n" in path.read_text()


@pytest.mark.parametrize(
    "text",
    ["efficiencies = {cpu = {memory_share = 1}}\n", "[efficiencies]\ncpu.memory_share = 1\n"],
)
def test_a_table_that_has_no_line_of_its_own_is_never_torn_out(text: str):
    with pytest.raises(ValueError, match="cannot be taken apart"):
        merge_measured(text, "cpu", format_measured("cpu", ROW, []), force=True)


def test_a_file_that_is_not_toml_is_left_alone(tmp_path: Path):
    path = tmp_path / "our.toml"
    path.write_text("[half")
    with pytest.raises(JobError, match="T016"):
        write_measured(path, "cpu", ROW, [], force=True)
    assert path.read_text() == "[half"


def test_a_name_that_needs_quotes_gets_them():
    text = format_measured("NVIDIA H100 96GB", {"memory_share": 0.9}, [])
    assert tomllib.loads(text)["efficiencies"] == {"NVIDIA H100 96GB": {"memory_share": 0.9}}
