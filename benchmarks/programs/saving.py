"""Inside the ranks of `checkpoint_stall.py`: what a save costs, paired with steps beside none.

Windows of ten steps in turn: one begins with a save, the next with a plain copy of the same bytes
into memory that is kept. The copy's time is not counted in its window.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from paceline.runtime import Session
from paceline.runtime.checkpoint import Checkpointer, Saved
from paceline.runtime.checkpoint._process import writer_process
from paceline.runtime.checkpoint._save_plan import SavePlanner
from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.state import named_state

WINDOW = 10


def train(session: Session) -> None:
    """Train, and note windows, stalls, copies and writes."""
    spec, shape = session.job.spec, session.plan.decoder
    assert shape is not None
    text, _ = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)
    keeper = Checkpointer(session.run.path / "timed", spec.checkpoint)
    seen: dict[str, list[float]] = {
        name: [] for name in ("save", "plain", "stall", "copy", "write", "cpu")
    }
    room: list[torch.Tensor] = []
    num_bytes, late, began, spent = [0, 0], 0, 0.0, 0.0
    for step in session.steps(model, optimizer, tokens_per_sample=spec.data.seq_len):
        window, place = divmod(step.number - 1, WINDOW)
        saves = window % 2 == 1
        if place == 0:
            if window > 0:
                seen["plain" if saves else "save"].append(time.perf_counter() - began)
                seen["cpu"].append(time.process_time() - spent)
            late += keeper._writing is not None
            while (outcome := keeper.wait()) is not None:
                assert isinstance(outcome, Saved), outcome
                seen["write"].append(outcome.write_s)
                num_bytes[0] = outcome.num_bytes
            dist.barrier()
            if window > 0 and not saves:
                share = SavePlanner().plan_save(named_state(model, optimizer), None).share
                live = [each for each in share.tensors if each is not None]
                room = room or [torch.empty_like(each) for each in live]
                dist.barrier()
                start = time.perf_counter()
                for kept, each in zip(room, live, strict=True):
                    kept.copy_(each)
                seen["copy"].append(time.perf_counter() - start)
                num_bytes[1] = sum(each.nbytes for each in live)
                dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            if saves:
                seen["stall"].append(keeper.start(step.number, model, optimizer))
        for ids in step.micro_batches(text.num_samples):
            inputs, targets = text.samples(ids)
            step.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        step.apply()
        outcome = keeper.poll()
        if isinstance(outcome, Saved):
            seen["write"].append(outcome.write_s)
            num_bytes[0] = outcome.num_bytes
    keeper.wait()
    writer = writer_process().pid
    fields = Path(f"/proc/{writer}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime and stime: proc(5)
    seen["writer_cpu"] = [ticks / os.sysconf("SC_CLK_TCK")]
    if session.is_first:
        told = {**seen, "bytes": num_bytes, "late": late}
        (session.run.path / "saving.json").write_text(json.dumps(told))
