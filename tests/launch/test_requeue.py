"""What is left of a Slurm job whose first node is lost; a pretend Slurm answers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRETEND = """#!{python}
import pathlib, sys
box, words = pathlib.Path({box!r}), sys.argv[1:]
with (box / "asked").open("a") as file:
    file.write(pathlib.Path(sys.argv[0]).name + " " + " ".join(words) + "\\n")
if words[1:3] == ["show", "hostnames"]:
    print(words[3].replace(",", "\\n"))
elif words[1:3] == ["show", "job"]:
    left = (box / "jobs").read_text().splitlines()
    print(left[0])
    (box / "jobs").write_text("\\n".join(left[1:] or left))
elif words[1] == "requeue":
    sys.exit(int((box / "requeue").read_text()))
"""
WELL = "JobId=7 JobState=RUNNING NodeList=node0,node1 BatchHost=node0"
LOST = "JobId=7 JobState=RUNNING NodeList=node1 BatchHost=node0"


def asked(box: Path, *jobs: str, requeue: int = 0) -> list[str]:
    """What it asks of Slurm beyond questions, when Slurm says these of the job one by one."""
    (box / "jobs").write_text("\n".join(jobs))
    (box / "requeue").write_text(str(requeue))
    for name in ("scontrol", "scancel"):
        (box / name).write_text(PRETEND.format(python=sys.executable, box=str(box)))
        (box / name).chmod(0o755)
    path = f"{box}{os.pathsep}{os.environ['PATH']}"
    code = "import paceline.launch.requeue as it; it._LOOK_S = 0.01; it.main()"
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PATH": path, "SLURM_JOB_ID": "7"},
        check=True,
        timeout=300,
        capture_output=True,
    )
    return [line for line in (box / "asked").read_text().splitlines() if " show " not in line]


def test_a_job_whose_first_node_is_lost_goes_back_into_the_queue(tmp_path):
    assert asked(tmp_path, WELL, WELL, LOST) == ["scontrol --oneliner requeue 7"]


def test_a_job_that_may_not_go_back_gives_its_nodes_back(tmp_path):
    assert asked(tmp_path, LOST, requeue=1) == ["scontrol --oneliner requeue 7", "scancel 7"]


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", "CANCELLED"])
def test_a_job_that_is_over_or_goes_back_by_itself_is_left_alone(tmp_path, state):
    assert asked(tmp_path, WELL, WELL.replace("RUNNING", state)) == []
