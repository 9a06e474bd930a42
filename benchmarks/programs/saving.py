"""Inside the ranks of `checkpoint_stall.py`: what a save costs beside a copy of the same bytes.

Replicated state is dealt out over the ranks when it is saved, so the copy is of as many bytes as
this rank's part of a checkpoint.
"""

import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from paceline.runtime import Session
from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.state import named_state


def train(session: Session) -> None:
    """Train, and after every step also copy what this rank would save."""
    spec, shape = session.job.spec, session.plan.decoder
    assert shape is not None
    text, _ = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)
    copies = []
    for step in session.steps(model, optimizer, tokens_per_sample=spec.data.seq_len):
        for ids in step.micro_batches(text.num_samples):
            inputs, targets = text.samples(ids)
            step.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        step.apply()
        tensors = [t for t in named_state(model, optimizer).values() if torch.is_tensor(t)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        if session.plan.layout.sharding == "none":
            local = local[: len(local) // session.place.world_size]
        dist.barrier()
        start = time.perf_counter()
        clones = [tensor.clone() for tensor in local]
        copies.append((time.perf_counter() - start, sum(t.nbytes for t in clones)))
    if session.is_first:
        (session.run.path / "copies.json").write_text(json.dumps(copies))
