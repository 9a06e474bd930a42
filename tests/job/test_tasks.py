"""The files of `evaluate.tasks`."""

from pathlib import Path

import pytest
import yaml

from paceline.errors import JobError, Problem
from paceline.job import Job, parse_job
from paceline.job.tasks import read_tasks

TEXT = """\
model: {decoder: {layers: 2, hidden: 32, heads: 2}}
data: {path: x}
train: {global_batch: 8, steps: 100}
"""
TASK = {"task": "facts", "dataset_path": "json", "doc_to_text": "{{q}}"}


def job(folder: Path, *overrides: str) -> Job:
    return parse_job(TEXT, source="job.yaml", folder=folder, overrides=overrides)


def of(folder: Path, *names: str) -> Job:
    (folder / "tokenizer.json").write_text("{}")
    return job(folder, f"model.tokenizer={folder}", f"evaluate.tasks=[{', '.join(names)}]")


def write(path: Path, **changes: object) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({**TASK, **changes}))
    return path.name


def problems(asked: Job) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        read_tasks(asked)
    return list(caught.value.problems)


def test_paths_of_data_are_relative_to_the_folder_of_the_tasks_file(tmp_path):
    there = tmp_path / "tasks"
    files = {"test": "q*.jsonl", "train": ["q1.jsonl", "s3://bucket/x.jsonl"]}
    write(there / "facts.yaml", dataset_kwargs={"data_files": files, "field": "rows"})
    write(there / "own.yaml", task="own", dataset_path="./data")
    (there / "q1.jsonl").touch()
    (there / "data").mkdir()
    facts, own = read_tasks(of(tmp_path, "tasks/facts.yaml", "tasks/own.yaml"))
    assert facts == TASK | {
        "dataset_kwargs": {
            "data_files": {
                "test": f"{there}/q*.jsonl",
                "train": [f"{there}/q1.jsonl", "s3://bucket/x.jsonl"],
            },
            "field": "rows",
        }
    }
    assert own["dataset_path"] == str(there / "data")


def test_every_file_that_is_no_task_is_named_with_its_reason(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: facts\nx: [1\n")
    (tmp_path / "code.yaml").write_text("task: facts\ndoc_to_text: !function utils.text\n")
    files = {
        "gone.yaml": "it cannot be read: No such file",
        "broken.yaml": "it is no plain YAML in line 3",
        "code.yaml": "it is no plain YAML in line 2: could not determine a constructor for the tag",
        write(tmp_path / "group.yaml", task=["facts", "more"]): "no name of a task",
        write(tmp_path / "includes.yaml", include="base.yaml"): "`include` is not read",
        write(tmp_path / "nothing.yaml", dataset_path=None): "does not say what it reads",
        write(
            tmp_path / "data.yaml", dataset_kwargs={"data_files": "q.jsonl"}
        ): f"there is no {tmp_path / 'q.jsonl'}",
    }
    found = problems(of(tmp_path, *files))
    assert [problem.code for problem in found] == ["J014"] * len(files)
    for problem, (name, reason) in zip(found, files.items(), strict=True):
        assert problem.what.startswith(f"{name} of evaluate.tasks: ")
        assert reason in problem.what


def test_two_tasks_of_one_name_are_refused(tmp_path):
    one, two = write(tmp_path / "one.yaml"), write(tmp_path / "two.yaml")
    (problem,) = problems(of(tmp_path, one, two))
    assert "two.yaml of evaluate.tasks: another file has a task facts" in problem.what


def test_a_model_of_bytes_has_no_tasks(tmp_path):
    (problem,) = problems(job(tmp_path, f"evaluate.tasks=[{write(tmp_path / 'facts.yaml')}]"))
    assert "needs a model with a tokenizer" in problem.what


def test_programs_of_their_own_and_classification_have_no_tasks(tmp_path):
    with pytest.raises(JobError, match=r"evaluate.tasks needs .* program own:train builds its own"):
        job(tmp_path, "data.path=null", "program=own:train", "evaluate.tasks=[a.yaml]")
    labels = ("data.kind=classification", "data.labels=[a, b]", f"model.tokenizer={tmp_path}")
    with pytest.raises(JobError, match=r"data.kind classification trains one that names classes"):
        job(tmp_path, *labels, "evaluate.tasks=[a.yaml]")
    with pytest.raises(JobError, match=r"evaluate.prompts needs a model that writes text"):
        job(tmp_path, *labels, "evaluate.prompts=a.txt")


def test_without_tasks_nothing_is_read(tmp_path):
    assert read_tasks(job(tmp_path)) == ()
