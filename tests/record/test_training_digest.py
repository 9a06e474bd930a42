"""What makes two jobs train the same, as one number."""

import pytest

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.record.run import check_same_training, training_digest

JOB = """
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {path: corpus}
train: {global_batch: 8, steps: 9}
"""


def job(folder, *overrides):
    return parse_job(JOB, source="job.yaml", folder=folder, overrides=overrides)


def digest(folder, *overrides):
    return training_digest(job(folder, *overrides))


@pytest.mark.parametrize(
    "change", ["train.steps=90", "cluster.per_node=2", "layout.sharding=full", "checkpoint.every=5"]
)
def test_where_and_how_a_job_runs_is_not_in_its_digest(tmp_path, change):
    assert digest(tmp_path, change) == digest(tmp_path)


@pytest.mark.parametrize(
    "change",
    ["model.decoder.layers=3", "data.seq_len=64", "train.global_batch=16", "train.seed=1"],
)
def test_what_a_job_trains_is_in_its_digest(tmp_path, change):
    assert digest(tmp_path, change) != digest(tmp_path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("train.adapter.rank=8", "train.adapter.rank was 16 and would become 8"),
        ("train.adapter.kind=dora", "train.adapter.kind was lora and would become dora"),
        ("train.adapter.targets=all", "train.adapter.targets was attention and would become all"),
        ("train.adapter=null", "train.adapter was lora and would become left out"),
    ],
)
def test_a_run_is_not_resumed_with_another_adapter(tmp_path, change, what):
    before = job(tmp_path, "train.adapter={kind: lora}")
    check_same_training(before, job(tmp_path, "train.adapter={kind: lora, dropout: 0.1}"))
    with pytest.raises(JobError) as caught:
        check_same_training(before, job(tmp_path, "train.adapter={kind: lora}", change))
    (problem,) = caught.value.problems
    assert (problem.code, problem.what) == ("R005", what)


def test_s0_24_a_run_keeps_the_weights_of_its_classes_and_one_without_has_its_old_digest(tmp_path):
    classes = "data={kind: classification, labels: [a, b], path: corpus}"
    asked = (classes, "model.tokenizer=t", "train.objective={}")
    plain = job(tmp_path, *asked)
    weighted = job(tmp_path, *asked, "train.objective.class_weights=[1, 1.5]")
    assert digest(tmp_path, *asked) == digest(tmp_path, *asked[:2])
    assert training_digest(weighted) != training_digest(plain)
    check_same_training(weighted, weighted)
    with pytest.raises(JobError, match=r"class_weights was \[1\.0, 1\.5\] and would become None"):
        check_same_training(weighted, plain)


def test_a_run_without_an_adapter_is_not_resumed_with_one(tmp_path):
    with pytest.raises(JobError, match=r"train\.adapter was left out and would become lora"):
        check_same_training(job(tmp_path), job(tmp_path, "train.adapter={kind: lora}"))
