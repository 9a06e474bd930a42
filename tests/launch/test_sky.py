"""SkyPilot as a place: a pretend `sky` on PATH keeps what it was asked. Nothing is rented."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.run.scene import Scene

from paceline.launch.sky import cluster_name, read_job
from paceline.record.placement import read_placement
from paceline.record.run import RunFolder

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
box = Path({box!r})
with (box / "asked.jsonl").open("a") as file:
    file.write(json.dumps({{"words": sys.argv[1:], "folder": sorted(os.listdir("."))}}) + "\\n")
answers = json.loads((box / "answers.json").read_text())
words = " ".join(sys.argv[1:])
for start, answer in answers.items():
    if words.startswith(start):
        print(answer.get("out", ""), end="")
        print(answer.get("err", ""), end="", file=sys.stderr)
        sys.exit(answer.get("code", 0))
sys.exit(99)
"""


class Sky:
    """What it answers, and what it was asked."""

    def __init__(self, box: Path) -> None:
        self.box = box
        box.mkdir()
        program = box / "sky"
        program.write_text(FAKE.format(python=sys.executable, box=str(box)))
        program.chmod(0o755)

    def answer(self, answers: dict[str, dict[str, Any]]) -> None:
        (self.box / "answers.json").write_text(json.dumps(answers))

    @property
    def asked(self) -> list[dict[str, Any]]:
        path = self.box / "asked.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sky:
    made = Sky(tmp_path / "sky")
    monkeypatch.setenv("PATH", f"{made.box}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path / "it's a folder")
    made.job["cluster"] = {"accelerator": "H100-SXM", "nodes": 1, "per_node": 8}
    made.job["layout"] = {"tensor": 1, "pipeline": 1, "context": 1, "recompute": "none"}
    made.job["data"]["path"] = "/data/text"  # on the machines: none of this one's files is there
    made.write_job()
    return made


def run(scene: Scene, *words: str, code: int = 0) -> Any:
    done = scene.paceline(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def of_run(scene: Scene) -> str:
    return cluster_name(RunFolder(scene.folder / "out"))


def test_runs_of_one_long_name_have_clusters_of_their_own():
    days = ("20261121-101500", "20261129-230000")
    runs = [RunFolder(Path(f"/runs/llama-3-70b-pretrain-{day}")) for day in days]
    elsewhere = RunFolder(Path(f"/others/llama-3-70b-pretrain-{days[0]}"))
    names = {cluster_name(run) for run in (*runs, elsewhere)}
    assert len(names) == 3
    assert all(re.fullmatch(r"pl-llama-3-70b-pre-[0-9a-f]{10}", name) for name in names)
    assert max(map(len, names)) <= 30


def test_a_run_is_submitted_as_the_dry_run_shows_it(scene, sky):
    sky.answer({"launch": {"out": "Job submitted, ID: 1\n"}})
    words = ("run", "job.yaml", "--on", "sky", "--out", "out")
    shown = json.loads(run(scene, *words, "--dry-run", "--json").stdout)
    assert sky.asked == []
    run(scene, *words)
    (asked,) = sky.asked
    assert ["sky", *asked["words"]] == shown["command"]
    name = of_run(scene)
    assert asked["words"][:3] == ["launch", "--cluster", name]
    assert {"task.yaml", "launch.sh", "train.py", "cloud_guard.py"} <= set(asked["folder"])
    placement = read_placement(scene.folder / "out")
    assert placement is not None
    assert (placement.place, placement.job_id) == ("sky", f"{name}:1")


def test_a_run_that_would_end_at_once_is_refused_before_anything_is_rented(scene, sky):
    words = ("run", "job.yaml", "--on", "sky", "--out", "out", "--set", "train.compile=true")
    done = run(scene, *words, "--dry-run", code=3)
    assert "H002" in done.stderr
    assert sky.asked == []


def test_without_skypilot_the_extra_is_named(scene):
    done = run(scene, "run", "job.yaml", "--on", "sky", "--out", "out", code=2)
    assert "W009: sky is not installed" in done.stderr
    assert "[sky]'" in done.stderr
    assert not (scene.folder / "out").exists()


def test_a_secret_that_is_not_set_is_missed_before_anything_is_rented(scene, sky, monkeypatch):
    scene.job["cloud"] = {"secrets": ["MY_TOKEN"]}
    scene.write_job()
    monkeypatch.delenv("MY_TOKEN", raising=False)
    done = run(scene, "run", "job.yaml", "--on", "sky", "--out", "out", code=2)
    assert "H042: MY_TOKEN is not set in your environment" in done.stderr
    assert sky.asked == []
    monkeypatch.setenv("MY_TOKEN", "do-not-write-this-down")
    sky.answer({"launch": {"out": "Job submitted, ID: 1\n"}})
    run(scene, "run", "job.yaml", "--on", "sky", "--out", "out")
    assert "--secret MY_TOKEN" in " ".join(sky.asked[0]["words"])
    kept = [path.read_text() for path in (scene.folder / "out").rglob("*") if path.is_file()]
    assert not [text for text in kept if "do-not-write" in text]


def test_what_skypilot_refuses_is_said_and_given_back(scene, sky):
    refusal = {"code": 1, "err": "sky.exceptions.ResourcesUnavailableError: no H100 anywhere\n"}
    sky.answer({"launch": refusal, "down": {}})
    done = run(scene, "run", "job.yaml", "--on", "sky", "--out", "out", code=2)
    assert "H043" in done.stderr
    assert "no H100 anywhere" in done.stderr
    assert sky.asked[-1]["words"] == ["down", "--yes", of_run(scene)]
    assert not (scene.folder / "out").exists()


def test_status_logs_and_stop_ask_skypilot(scene, sky):
    name = of_run(scene)
    row = {"job_id": 3, "status": "RUNNING", "start_at": 1_700_000_000.0, "end_at": None}
    sky.answer(
        {
            "launch": {"out": "Job submitted, ID: 3\n"},
            f"queue {name}": {"out": "Fetching...\n" + json.dumps({name: [row]})},
            "down": {},
        }
    )
    run(scene, "run", "job.yaml", "--on", "sky", "--out", "out")
    said = json.loads(run(scene, "status", "out", "--json").stdout)
    assert said["queue"]["detail"] == "RUNNING"
    assert said["queue"]["state"] == "running"
    run(scene, "stop", "out")
    assert sky.asked[-1]["words"] == ["down", "--yes", of_run(scene)]


def test_a_run_on_spot_machines_is_a_managed_job(scene, sky):
    scene.job["plan"] = {"spot": True}
    scene.write_job()
    row = {"job_id": 7, "status": "RECOVERING", "recovery_count": 2, "start_at": 1.0}
    sky.answer(
        {
            "jobs launch": {"out": "Job submitted, ID: 7\n"},
            "jobs queue": {"out": json.dumps([row | {"job_id": 6}, row])},
            "jobs cancel": {},
        }
    )
    run(scene, "run", "job.yaml", "--on", "sky", "--out", "out")
    said = json.loads(run(scene, "status", "out", "--json").stdout)
    assert said["queue"]["detail"] == "RECOVERING"
    assert said["queue"]["restarts"] == 2
    run(scene, "stop", "out")
    assert sky.asked[-1]["words"] == ["jobs", "cancel", "--yes", "7"]


def test_a_managed_job_whose_number_is_not_read_is_ended(scene, sky):
    scene.job["plan"] = {"spot": True}
    scene.write_job()
    sky.answer(
        {"jobs launch": {"out": "Launched, as another version says it\n"}, "jobs cancel": {}}
    )
    done = run(scene, "run", "job.yaml", "--on", "sky", "--out", "out", code=2)
    assert "H043" in done.stderr
    assert sky.asked[-1]["words"] == ["jobs", "cancel", "--yes", "--name", of_run(scene)]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("INIT", "waiting"),
        ("STARTING", "waiting"),
        ("RUNNING", "running"),
        ("RECOVERING", "running"),
        ("SUCCEEDED", "finished"),
        ("CANCELLED", "cancelled"),
        ("FAILED_SETUP", "failed"),
        ("FAILED_NO_RESOURCE", "failed"),
        ("SOMETHING_NEW", "unknown"),
    ],
)
def test_every_word_of_skypilot_is_a_state(word, state):
    assert read_job({"job_id": 1, "status": word}, cluster="pl-a").state == state
