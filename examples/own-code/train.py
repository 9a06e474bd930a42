"""A training loop of your own: a classifier of two spirals, on as many ranks as the job says.

    paceline run examples/own-code/job.yaml

What differs from plain PyTorch: `session.build`, `session.steps`, `step.micro_batches`,
`step.backward` and `step.apply`. For that the run is planned, sharded, clipped, voted on,
checkpointed, resumed to the bit and rescued when a worker dies.
"""

import torch
import torch.nn.functional as F
from torch import nn

from paceline.runtime import Session


def build_model() -> nn.Module:
    """Two inputs, two classes. `model.factory` in job.yaml, so that the plan knows its size."""
    layers = [nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)]
    return nn.Sequential(*layers)


def spirals(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two noisy spirals, and which of the two each is on."""
    draw = torch.Generator().manual_seed(seed)
    turn = 6.0 * torch.rand(num_samples, generator=draw).sqrt()
    label = torch.randint(0, 2, (num_samples,), generator=draw)
    angle = turn + label * torch.pi
    points = torch.stack((turn * angle.cos(), turn * angle.sin()), dim=1)
    return points + 0.1 * torch.randn(points.shape, generator=draw), label


def train(session: Session) -> None:
    """`program` in job.yaml: called on every rank, and again after a failure."""
    points, labels = spirals(8192, seed=1)
    test_points, test_labels = spirals(1024, seed=2)
    model = session.build(build_model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)

    def evaluate() -> tuple[torch.Tensor, int]:
        share = slice(session.place.rank, None, session.place.world_size)
        loss = F.cross_entropy(model(test_points[share]), test_labels[share], reduction="sum")
        return loss, len(test_labels[share])

    for step in session.steps(model, optimizer, evaluate=evaluate):
        for ids in step.micro_batches(len(points)):
            loss = F.cross_entropy(model(points[ids]), labels[ids])
            step.backward(loss)
        step.apply()
