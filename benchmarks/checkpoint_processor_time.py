"""Processor time of saving, for machines that are busy with other things as well.

    .venv/bin/python benchmarks/checkpoint_processor_time.py [saves]

One rank, one thread, float32. What the stall costs the training thread against a plain copy of the
same bytes into memory that is kept, in turn, 25 million parameters; and what a save costs writer
and worker together against ten steps of 512 tokens, 6.6 million parameters. Wall times are of
`checkpoint_stall.py`.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from figures import interval, machine, ratio_of_medians, spread

from paceline.job import CheckpointSpec
from paceline.profile import DecoderShape
from paceline.runtime.checkpoint import Checkpointer
from paceline.runtime.checkpoint._process import writer_process
from paceline.runtime.checkpoint._save_plan import SavePlanner
from paceline.runtime.checkpoint._staging import Stage
from paceline.runtime.decoder import Decoder
from paceline.runtime.state import named_state

SEQ_LEN, BATCH = 128, 4


def make(hidden: int, ffn: int) -> tuple[Decoder, torch.optim.Optimizer]:
    """A decoder and an optimizer with state."""
    shape = DecoderShape(
        layers=8,
        hidden=hidden,
        heads=8,
        kv_heads=8,
        head_dim=hidden // 8,
        ffn=ffn,
        vocab=256,
        tied_embeddings=False,
    )
    model = Decoder(shape, SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    tokens = torch.randint(0, 256, (BATCH, SEQ_LEN + 1))
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def spent(clock: Callable[[], float], action: Callable[[], object]) -> float:
    """Seconds of a clock that an action takes."""
    start = clock()
    action()
    return clock() - start


def stall_against_copy(saves: int) -> None:
    """The training thread's own time."""
    model, optimizer = make(512, 1376)
    planner, stage = SavePlanner(), Stage()
    share = planner.plan_save(named_state(model, optimizer), None).share
    live = [each for each in share.tensors if each is not None]
    room = [torch.empty_like(each) for each in live]

    def copy() -> None:
        for kept, each in zip(room, live, strict=True):
            kept.copy_(each)

    def stall() -> None:
        stage.copy(planner.plan_save(named_state(model, optimizer), None).share)

    for warm in (stall, copy):
        warm()
    pairs = [(spent(time.thread_time, stall), spent(time.thread_time, copy)) for _ in range(saves)]
    print(f"{sum(each.nbytes for each in live) / 1e6:.0f} MB in {len(live)} tensors")
    print(f"  stall:        {spread([one for one, _ in pairs], digits=4)}")
    print(f"  copy:         {spread([other for _, other in pairs], digits=4)}")
    ratio, low, high = interval(pairs, ratio_of_medians)
    print(f"  stall / copy: {ratio:.2f} ({low:.2f}-{high:.2f}, 95 %)")


def writer_seconds() -> float:
    """Processor time of the writer process so far: utime and stime, proc(5)."""
    text = Path(f"/proc/{writer_process().pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def save_against_steps(folder: Path, saves: int) -> None:
    """Writer and worker together, after the first save."""
    model, optimizer = make(256, 704)
    steps = [spent(time.process_time, lambda: train(model, optimizer)) for _ in range(saves)]
    keeper = Checkpointer(folder, CheckpointSpec(keep_last=2))
    keeper.start(1, model, optimizer)
    keeper.wait()
    print(f"first save: writer {writer_seconds():.2f} s, its start included")
    writer, worker = [], []
    for number in range(2, saves + 2):
        before = writer_seconds()
        start = time.process_time()
        keeper.start(number, model, optimizer)
        worker.append(time.process_time() - start)
        saved = keeper.wait()
        writer.append(writer_seconds() - before)
    print(f"{saved.num_bytes / 1e6:.0f} MB saved by one rank")
    print(f"  writer:   {spread(writer)}")
    print(f"  worker:   {spread(worker, digits=4)}")
    print(f"  a step:   {spread(steps)}")
    cost = statistics.median(writer) + statistics.median(worker)
    print(f"  overhead at one save in 10 steps: {cost / (10 * statistics.median(steps)):.1%}")
    status = Path(f"/proc/{writer_process().pid}/status").read_text().splitlines()
    print(
        f"  writer's own memory: {next(x for x in status if x.startswith('RssAnon')).split()[1]} kB"
    )


def main() -> None:
    """Print both."""
    saves = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print(f"measured; {machine()}; processor time")
    folder = Path(tempfile.mkdtemp())
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        stall_against_copy(saves)
        save_against_steps(folder / "saves", saves)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit


if __name__ == "__main__":
    main()
