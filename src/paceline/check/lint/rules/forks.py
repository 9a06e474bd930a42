"""Processes forked, or started from a notebook, by a process that uses CUDA already."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.program import Program
from paceline.check.lint.rules.groups import is_cuda

PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")

POOLS = (
    "torch.multiprocessing.Pool",
    "multiprocessing.Pool",
    "concurrent.futures.ProcessPoolExecutor",
)

NOTEBOOK = "accelerate.notebook_launcher"


def check_fork_after_cuda(program: Program, context: Context) -> Iterator[Finding]:
    """CUDA in use before processes are forked that use it too."""
    if program.has_call(method=("set_start_method", "get_context")):
        return
    for fork in program.calls(*PROCESSES, *POOLS, NOTEBOOK):
        if fork.has_argument(None, "mp_context") or not uses_cuda_after(program, fork):
            continue
        for call in program.all_calls:
            if call.order > fork.order or call.root != fork.root or not starts_cuda(call):
                continue
            if any(frame.call is fork for frame in call.frames):
                continue
            if {id(one.node) for one in call.guards} - {id(one.node) for one in fork.guards}:
                continue  # only some of the runs that fork come there
            what = (
                f"CUDA is initialised here, and {fork.spot} forks processes: it cannot be "
                "initialised in them again"
            )
            fix = 'mp.set_start_method("spawn"), or use CUDA only inside the processes'
            yield program.finding("cuda-init-before-fork", call, what, fix, seen=(fork,))
            return


def uses_cuda_after(program: Program, fork: Call) -> bool:
    """Whether the forked process uses CUDA, as far as its function can be followed."""
    if fork.name == NOTEBOOK:
        count = fork.argument(2, "num_processes")
        return count is not None and isinstance(count.likely(), int) and count.likely() > 1
    inside = [one for one in program.all_calls if any(frame.call is fork for frame in one.frames)]
    if fork.name in POOLS:
        tasks = [
            one.function
            for call in program.calls(method=TASKS)
            if call.receiver is not None and fork.result in call.receiver.any() and call.args
            for one in call.args[0].any()
        ]
        tasks += [
            one.function
            for each in (fork.argument(None, "initializer"),)
            for one in (each.any() if each is not None else ())
        ]
        functions = [one for one in tasks if one is not None]
        inside = [
            one
            for one in program.all_calls
            if any(frame.function in functions for frame in one.frames)
        ]
    return any(starts_cuda(one) or one.method in {"cuda", "to"} for one in inside)


TASKS = (
    *("map", "imap", "imap_unordered", "starmap", "apply", "submit"),
    *("apply_async", "map_async", "starmap_async"),
)
"""Methods of a pool that run a function in its processes."""


def starts_cuda(call: Call) -> bool:
    """Whether a call initialises CUDA in this process, if it has not been."""
    if call.name in {"torch.cuda.set_device", "torch.cuda.current_device", "torch.cuda.init"}:
        return True
    if call.method == "cuda":
        return call.receiver is not None and call.receiver.name is None
    given = call.argument(0) if call.method == "to" else call.argument(None, "device")
    if given is None or call.name == "torch.device":
        return False
    return all(is_cuda(one) for one in given.any())


RULES = (check_fork_after_cuda,)
