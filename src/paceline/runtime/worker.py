"""One rank's process: meet the others, run the training function, leave a completion record.

python -m paceline.runtime.worker --run DIR --rank 0 ...     (the agent starts it)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from paceline.control import messages as say
from paceline.control.agent import die_with_parent
from paceline.errors import JobError, PacelineError, Problem, RunError
from paceline.parallel.layout import Layout
from paceline.record.run import open_run
from paceline.runtime.channel import Channel

if TYPE_CHECKING:
    from paceline.runtime.session import Session
    from paceline.spec import Job


@dataclass(frozen=True, slots=True)
class _Options:
    run: Path
    rank: int
    local_rank: int
    generation: int
    channel: int
    agent: int
    faults: tuple[str, ...]


def main() -> NoReturn:
    """Entry point of the worker's process; never returns and never raises."""
    options = _parse(sys.argv[1:])
    die_with_parent(options.agent)
    channel = Channel(options.channel)
    _stop_on_signals(channel)
    pid = os.getpid()
    try:
        _work(options, channel)
    except BaseException as error:  # noqa: BLE001
        # The edge of the process: whatever it was goes into this log and to the controller, in
        # that order, as the controller ends this process as soon as it hears of it.
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        if os.getpid() == pid:  # a forked child of the program's speaks for nobody
            channel.send(_last_words(error))
        _leave(1)
    _leave(0)


def _work(options: _Options, channel: Channel) -> None:
    import torch
    import torch.distributed as dist

    from paceline.runtime.faults import Faults
    from paceline.runtime.session import Place, Session

    run = open_run(options.run)
    job, plan = run.job(), run.plan()
    device = _device(plan.cluster.backend, options.local_rank)
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    backend = transports(plan.cluster.backend, plan.layout)
    _meet(options, channel, plan.layout.num_ranks, backend, device, job)
    place = Place(
        rank=options.rank,
        world_size=dist.get_world_size(),
        local_rank=options.local_rank,
        generation=options.generation,
        device=device,
    )
    session = Session(
        job=job,
        plan=plan,
        run=run,
        place=place,
        channel=channel,
        faults=Faults(options.faults, rank=options.rank, channel=channel),
    )
    program = _program(job)
    program(session)
    record = session.completion()
    del session, program
    _part(channel, record)


def _parse(arguments: Sequence[str]) -> _Options:
    parser = argparse.ArgumentParser(prog="paceline-worker", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    for name in ("rank", "local-rank", "generation", "channel", "agent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--faults", default="", help="faults of a drill, joined by commas")
    options = parser.parse_args(arguments)
    faults = tuple(fault for fault in options.faults.split(",") if fault)
    return _Options(
        options.run,
        options.rank,
        options.local_rank,
        options.generation,
        options.channel,
        options.agent,
        faults,
    )


def _device(backend: str, local_rank: int) -> torch.device:  # type: ignore[name-defined] # noqa: F821
    import torch

    if backend == "gloo":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def transports(backend: str, layout: Layout) -> str:
    """What ranks talk over: NCCL cannot send what an offloaded state keeps in host memory.

    >>> layout = Layout(data=2, sharding="full", offload="cpu", micro_batch=1, accumulation=1)
    >>> transports("nccl", layout)
    'cpu:gloo,cuda:nccl'
    """
    return "cpu:gloo,cuda:nccl" if backend == "nccl" and layout.offload == "cpu" else backend


def _meet(
    options: _Options,
    channel: Channel,
    num_ranks: int,
    backend: str,
    device: torch.device,  # type: ignore[name-defined] # noqa: F821
    job: Job,
) -> None:
    """Form the process group: rank 0 serves the store, the controller says where."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore  # where dist has it from, with its types

    store = None
    if options.rank == 0:
        listener = _listen(job)
        host, port = listener.getsockname()
        store = TCPStore(
            host, port, num_ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        channel.send(say.StoreListening(host=host, port=port))
    where = channel.wait_for_rendezvous()
    if store is None:
        store = TCPStore(where.host, where.port, num_ranks, False)
    dist.init_process_group(backend, store=store, rank=options.rank, world_size=num_ranks)
    here = torch.ones(1, device=device)
    dist.all_reduce(here)  # the world that answers, not the one that was asked for
    channel.send(say.Met(world_size=int(here.item()), backend=dist.get_backend()))


def _listen(job: Job) -> socket.socket:
    """The store's socket, on this machine only: given a host, TCPStore listens to all of them."""
    asked = job.spec.cluster.rendezvous_port
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", 0 if asked == "auto" else asked))
    except OSError as error:
        raise JobError(
            Problem(
                code="R012",
                what=f"port {asked} cannot be used on 127.0.0.1: {error.strerror}",
                where=job.where("cluster.rendezvous_port"),
                fix="leave it out to take a free port, or end the program that holds it",
            )
        ) from None
    listener.listen(4096)
    return listener


def _program(job: Job) -> Callable[[Session], None]:
    """The training function: the job's own, or the built-in language-model trainer."""
    name = job.spec.program
    if name is None:
        from paceline.runtime.language_model import train

        return train
    from paceline.runtime.models import import_named

    module = name.partition(":")[0]
    try:
        found: Callable[[Session], None] = import_named(job.folder, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise JobError(
            Problem(
                code="R023",
                what=f"{name} cannot be imported: {error}",
                where=job.where("program"),
                fix=f"write it as module:function, with {module}.py in {job.folder}",
            )
        ) from error
    return found


def _stop_on_signals(channel: Channel) -> None:
    """SIGTERM or SIGINT to any worker stops the whole run at the next step boundary."""

    def stop(number: int, frame: FrameType | None) -> None:
        channel.ask_to_stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _part(channel: Channel, record: say.Completed) -> None:
    """End together: every rank is through before any leaves.

    A DDP model that is alive when the interpreter shuts down makes gloo's thread abort the
    process (torch 2.13). So the model is collected first, the groups are destroyed after a
    barrier, and the process leaves without interpreter shutdown; what counts is the record.
    """
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    channel.send(record)
    dist.destroy_process_group()


def _last_words(error: BaseException) -> say.Crashed:
    text = _printable(str(error))
    frames = traceback.format_exception(error)[-6:]
    needs_a_person = isinstance(error, PacelineError | ImportError | SyntaxError)
    return say.Crashed(
        kind=type(error).__name__,
        message=text[:2000],
        where=_printable("".join(frames))[-4000:],
        peer_lost=say.names_lost_peer(text),
        retry=not needs_a_person,
        exit_code=error.exit_code if isinstance(error, PacelineError) else RunError.exit_code,
    )


def _printable(text: str) -> str:
    """Without what UTF-8 cannot say, such as half of a surrogate pair in a file's name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
