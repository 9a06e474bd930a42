"""Files that a command is asked to write."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import prove, verify
from paceline.cli.output_file import check_can_write
from paceline.errors import JobError

JOB = "model: {decoder: {layers: 2, hidden: 32, heads: 4}}\ntrain: {global_batch: 8, steps: 2}\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [(prove.command, "--plot"), (prove.command, "--trace"), (verify.command, "--facts")],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    command: object, option: str, tmp_path: Path
):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    place = tmp_path / "nowhere" / "file"
    result = CliRunner().invoke(command, [str(job), option, str(place)])  # type: ignore[arg-type]
    assert isinstance(result.exception, JobError)
    assert "R002" in str(result.exception)
    assert str(place) in str(result.exception)


def test_looking_leaves_no_file_behind_and_keeps_one_that_is_there(tmp_path: Path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    check_can_write(new, "--plot")
    check_can_write(old, "--plot")
    assert not new.exists()
    assert old.read_text() == "kept"
