"""Run a test's function on real ranks: one process each, gloo, a time limit, and their results.

    def check(rank: int, world: int, folder: Path) -> float: ...

    losses = run_ranks(check, 2, folder)

The function is found again by its file and name, so it must be at the top of its module; its
arguments and result are pickled. Warnings are errors on the ranks too.
"""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# A rank is forked from a server that has imported once what tests of ranks import, and run nothing:
# 0.1 s of a core for each rank, where torch takes 3 s, our own modules and pytest 0.4 s, and
# transformers 1.6 s (measured). What is not installed is left out.
_CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "pytest"),
        *("paceline.runtime.language_model", "paceline.runtime.session", "paceline.prove.prove"),
        *("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
        *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
        *("transformers.models.mixtral.modeling_mixtral", "hypothesis"),
    ]
)


def start_server() -> None:
    """Start the server that this process and its forks share."""
    server = forkserver._forkserver
    server.ensure_running()
    # A fork would ask the kernel for it as for a child of its own.
    os.register_at_fork(after_in_child=lambda: vars(server).update(ensure_running=lambda: None))


LIMIT_S = 540.0
"""Only a hang takes so long: the slowest test has taken 172 s, on a busy machine."""


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """`function(rank, world, *args)` on each of `world` ranks; their results, by rank.

    Raises:
        AssertionError: A rank raised (with its traceback), died, or the time ran out (with the
            stack of every rank that still ran).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {
            "function": (function.__code__.co_filename, function.__name__),
            "args": args,
            "world": world,
            "folder": name,
            "limit_s": limit_s,
        }
        processes = [
            _CONTEXT.Process(
                target=runpy.run_path,
                args=(__file__, {"TASK": {**task, "rank": rank}}, "__rank__"),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        _wait_for(processes, limit_s)
        failures = [_failure(folder, rank, processes[rank].exitcode) for rank in range(world)]
        told = "\n".join(failure for failure in failures if failure)
        assert not told, f"{function.__name__} on {world} ranks:\n{told}"
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def _wait_for(processes: list[Any], limit_s: float) -> None:
    """Until all have ended; the others get 3 s once one has failed, and all are gone after."""
    end = time.monotonic() + limit_s + 2
    running = list(processes)
    while running and (left := end - time.monotonic()) > 0:
        wait([process.sentinel for process in running], timeout=left)
        failed = any(process.exitcode for process in running)
        running = [process for process in running if process.exitcode is None]
        if failed:
            end = min(end, time.monotonic() + 3)
    for process in running:
        process.kill()
    for process in processes:
        process.join()


def _failure(folder: Path, rank: int, exit_code: int) -> str:
    if exit_code == 0:
        return ""
    stack = folder / f"stack-{rank}"
    told = stack.read_text() if stack.exists() else ""
    return f"--- rank {rank} ended with {exit_code}\n{told}"


def _rank(task: dict[str, Any]) -> None:
    """What a rank does. Ends by os._exit: torch's gloo threads may abort a normal exit."""
    folder, rank, world = Path(task["folder"]), task["rank"], task["world"]
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.dump_traceback_later(task["limit_s"], file=stack, exit=True)
    exit_code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        warnings.simplefilter("error")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=task["limit_s"]),
        )
        result = _load(*task["function"])(rank, world, *task["args"])
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        exit_code = 0
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc(file=stack)
    stack.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("ranks_test_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


if __name__ == "__rank__":
    _rank(globals()["TASK"])
