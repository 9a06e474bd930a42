"""The evaluation loss of several sources, and who may ask for an early end."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.runtime.evaluation import Evaluation, mean_of

JOB = """\
model: {factory: "mine:make"}
program: mine:train
train: {global_batch: 8, steps: 100}
evaluate: {patience: 2}
"""


def test_sources_with_weights_count_by_weight_however_many_targets_they_have():
    assert mean_of([20.0, 600.0], [10.0, 100.0], [3.0, 1.0]) == (3 * 2.0 + 1 * 6.0) / 4


def test_a_source_without_targets_takes_no_part():
    assert mean_of([0.0, 600.0], [0.0, 100.0], [3.0, 1.0]) == 6.0


def test_sources_without_weights_count_by_their_targets():
    assert mean_of([20.0, 600.0], [10.0, 100.0], [0.0, 0.0]) == 620 / 110
    assert mean_of([20.0], [10.0], [0.0]) == 2.0


def test_patience_with_a_program_that_evaluates_nothing_is_refused():
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"))
    here = SimpleNamespace(job=job, plan=SimpleNamespace(evaluate_every=10))
    with pytest.raises(JobError, match="the program evaluates nothing"):
        Evaluation(here, torch.nn.Identity(), None, {}).check()  # type: ignore[arg-type]
    Evaluation(here, torch.nn.Identity(), lambda: (0.0, 1.0), {}).check()  # type: ignore[arg-type]
