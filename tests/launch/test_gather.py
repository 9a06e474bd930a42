"""What the nodes of a job are asked."""

import shutil
from pathlib import Path

import pytest
import yaml
from tests.run.scene import JOB

from paceline.job import Job, parse_job
from paceline.job.corpus import find_corpus
from paceline.launch.gather import question_of
from paceline.topology.node.probe_storage import hash_code, hash_data


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
    assert asked.code == {
        "job folder": str(tmp_path),
        "config.json": str(tmp_path / "config.json"),
    }
    assert asked.ports == ()


def test_a_job_without_a_program_has_no_code_and_a_port_that_is_named_is_tried(tmp_path):
    cluster = JOB["cluster"] | {"rendezvous_port": 29500}
    asked = question_of(job_of(tmp_path, cluster=cluster), tmp_path)
    assert asked.code == {}
    assert asked.ports == (29500,)


@pytest.mark.parametrize("name", ["mine.py", "helper.py", "conf/a.yaml", "job.yaml"])
def test_s4_11_a_node_with_another_file_of_the_job_has_another_hash_wherever_its_folder_is(
    tmp_path, name
):
    hashes = []
    for node, text in enumerate(["x = 1", "x = 1", "x = 2"]):
        folder = tmp_path / f"node-{node}"
        for each in ("mine.py", "helper.py", "conf/a.yaml", "job.yaml"):
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / each).write_text(text if each == name else "y = 1")
        (folder / "runs").mkdir()
        (folder / "runs" / "of.py").write_text(str(node))
        job = job_of(folder, program="mine:main")
        hashes.append(hash_code(question_of(job, folder).code, own=False))
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0].keys() == {"job folder"}


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


def test_s4_11_data_of_the_same_size_with_another_content_have_another_hash(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("heron\n" * 1000)
    job = job_of(tmp_path, data={"path": "text/*.txt", "seq_len": 32, "held_out": 0})
    asked = question_of(job, tmp_path).data
    before, sizes = hash_data(asked), hash_data(asked, reads=False)
    (tmp_path / "text/a.txt").write_text("HERON\n" * 1000)
    assert hash_data(asked) != before
    assert hash_data(asked, reads=False) == sizes


def test_s4_10_nodes_are_asked_for_the_jobs_own_weights_and_tokenizer(tmp_path):
    for name in ("mdl/config.json", "mdl/model.safetensors", "tok/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    asked = question_of(job_of(tmp_path, model={"pretrained": "mdl", "tokenizer": "tok"}), tmp_path)
    there = hash_data(asked.data)
    assert {name for name, digest in there.items() if digest} == {
        f"{tmp_path}/mdl/**",
        f"{tmp_path}/tok/**",
    }
    shutil.rmtree(tmp_path / "mdl")
    assert hash_data(asked.data)[f"{tmp_path}/mdl/**"] == ""
