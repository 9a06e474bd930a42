"""Inside the ranks of `step_time.py`: Paceline's step and a hand-written one, in turn."""

import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime import Session
from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import learning_rate_at, make_optimizer


def train(session: Session) -> None:
    """Same model, same data, same optimizer; what differs is who drives the step."""
    spec, shape, layout = session.job.spec, session.plan.decoder, session.plan.layout
    assert shape is not None
    text, _ = load_text(session.job)
    ours = session.build(lambda: Decoder(shape, spec.data.seq_len))
    our_optimizer = make_optimizer(ours, spec.train)
    torch.manual_seed(spec.train.seed)
    plain = DistributedDataParallel(Decoder(shape, spec.data.seq_len), gradient_as_bucket_view=True)
    plain_optimizer = make_optimizer(plain, spec.train)

    def plain_step(number: int) -> float:
        """What a careful person writes by hand, with the loss logged every step."""
        start = torch.randint(0, text.num_samples - layout.micro_batch, (1,)).item()
        for group in plain_optimizer.param_groups:
            group["lr"] = learning_rate_at(number, spec.train)
        inputs, targets = text.samples(range(start, start + layout.micro_batch))
        loss = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), spec.train.clip_norm)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        return float(logged)

    pairs = []
    steps = session.steps(ours, our_optimizer, tokens_per_sample=spec.data.seq_len)
    for number in range(1, spec.train.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        step = next(steps)
        for ids in step.micro_batches(text.num_samples):
            inputs, targets = text.samples(ids)
            step.backward(F.cross_entropy(ours(inputs).flatten(0, 1), targets.flatten()))
        step.apply()
        ours_s = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        plain_step(number)
        pairs.append((ours_s, time.perf_counter() - start))
    next(steps, None)
    if session.is_first:
        (session.run.path / "pairs.json").write_text(json.dumps(pairs))
