"""Whole runs: what the command leaves and says."""

import pytest
from tests.run.scene import Scene

pytestmark = pytest.mark.ranks


def test_a_run_writes_its_page_at_its_end(tmp_path):
    scene = Scene(tmp_path)
    done = scene.paceline("run", "job.yaml", "--out", "whole")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "report      whole/report.html"
    assert (tmp_path / "whole" / "report.html").read_text().startswith("<!")
    for rank in (0, 1):
        log = (tmp_path / f"whole/logs/rank-{rank}.log").read_text()
        steps = [line.split()[1] for line in log.splitlines() if line.startswith("step ")]
        assert (steps[0], steps[-1]) == ("1/12", "12/12")
