"""A training loop of your own: `paceline run examples/own-code/job.yaml` starts it on two ranks."""

import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Sequential, SiLU

from paceline.runtime import Session


def build_model() -> Module:
    """`model.factory` in job.yaml: a point on a plane -> which of two spirals it is on."""
    return Sequential(Linear(2, 64), SiLU(), Linear(64, 64), SiLU(), Linear(64, 2))


def spirals(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two noisy spirals, and which of the two each is on."""
    draw = torch.Generator().manual_seed(seed)
    turn = 6.0 * torch.rand(num_samples, generator=draw).sqrt()
    label = torch.randint(0, 2, (num_samples,), generator=draw)
    points = torch.view_as_real(torch.polar(turn, turn + label * torch.pi))
    return points + 0.1 * torch.randn(points.shape, generator=draw), label


def train(session: Session) -> None:
    """`program` in job.yaml: called on every rank, and again after a failure."""
    (points, labels), (tests, answers) = spirals(8192, seed=1), spirals(1024, seed=2)
    model = session.build(build_model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)

    def evaluate() -> tuple[torch.Tensor, int]:
        own = slice(session.place.rank, None, session.place.world_size)
        return F.cross_entropy(model(tests[own]), answers[own], reduction="sum"), len(tests[own])

    for step in session.steps(model, optimizer, evaluate=evaluate):
        for ids in step.micro_batches(len(points)):
            outputs = model(points[ids])
            step.backward(F.cross_entropy(outputs, labels[ids]))
            session.log(accuracy=(outputs.argmax(1) == labels[ids]).float().mean())
        step.apply()
