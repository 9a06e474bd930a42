"""What the helper that proves layouts is sent arrives as it was sent."""

import msgspec
import pytest
from tests.plan.scene import JOB, job_of, plan_of

from paceline.prove.proof import Request
from paceline.prove.request import request_of


@pytest.mark.parametrize(
    "accelerator", ["H100-SXM", "H100-NVL", "MI300X", "GB200", "TPU-v5p", "Trainium2", "Gaudi3"]
)
@pytest.mark.parametrize("nodes", [1, 4])
def test_rates_of_every_shape_of_links_pass_through_json(accelerator, nodes):
    """JSON has no infinity: a rate that is one arrives as nothing, and the proof fails."""
    given = (f"cluster.accelerator={accelerator}", f"cluster.nodes={nodes}")
    job, plan = job_of(JOB, *given), plan_of(JOB, *given)
    sent = request_of(job, plan)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=Request) == sent
