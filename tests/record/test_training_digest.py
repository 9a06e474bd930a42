"""What makes two jobs train the same, as one number."""

import pytest

from paceline.record.run import training_digest
from paceline.spec import parse_job

JOB = """
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {path: corpus}
train: {global_batch: 8, steps: 9}
"""


def digest(folder, *overrides):
    return training_digest(parse_job(JOB, source="job.yaml", folder=folder, overrides=overrides))


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
