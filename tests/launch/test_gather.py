"""What the nodes of a job are asked."""

from pathlib import Path

import pytest
import yaml
from tests.run.scene import JOB

from paceline.job import Job, parse_job
from paceline.job.corpus import find_corpus
from paceline.launch.gather import question_of
from paceline.topology.node.probe_storage import hash_data


def job_of(folder: Path, **sections: object) -> Job:
    return parse_job(yaml.safe_dump(JOB | sections), source="job.yaml", folder=folder)


def test_every_node_is_asked_for_what_the_job_reads_and_for_what_it_runs(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "config.json").write_text("{}")
    job = job_of(tmp_path, program="mine.train:main", model={"hf_config": "config.json"})
    asked = question_of(job, tmp_path / "runs")
    assert asked.folders == (str(tmp_path / "runs"),)
    assert asked.data == (str(tmp_path / "text" / "**"),)
    assert asked.code == (str(tmp_path / "mine"), str(tmp_path / "config.json"))
    assert asked.ports == ()


def test_a_program_of_one_file_is_that_file_and_a_port_that_is_named_is_tried(tmp_path):
    cluster = JOB["cluster"] | {"rendezvous_port": 29500}
    asked = question_of(job_of(tmp_path, program="mine:main", cluster=cluster), tmp_path)
    assert asked.code == (str(tmp_path / "mine.py"),)
    assert asked.ports == (29500,)


@pytest.mark.parametrize(
    "path", ["text", "text/*.txt", "text/a[1].txt", "~/text", ["text", "more"]]
)
def test_nodes_are_asked_for_the_files_that_the_job_trains_on(tmp_path, monkeypatch, path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("text/a[1].txt", "text/deep/b.txt", "text/.hidden", "more/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some words\n" * 40)
    job = job_of(tmp_path, data={"path": path, "seq_len": 32, "held_out": 0})
    before = hash_data(question_of(job, tmp_path).data)
    assert all(before.values())
    (tmp_path / "text/.hidden").write_text("is read by nobody")
    (tmp_path / "text/empty").mkdir()
    assert hash_data(question_of(job, tmp_path).data) == before
    trained = find_corpus(job)
    for file in {*trained.train, *trained.held_out}:
        text = file.read_text()
        file.write_text(text + "more")
        assert hash_data(question_of(job, tmp_path).data) != before
        file.write_text(text)
