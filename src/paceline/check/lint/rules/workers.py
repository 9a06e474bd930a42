"""What goes wrong with worker processes: forks after threads or CUDA, time limits, open files."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Function
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.groups import is_cuda, puts_model_on_gpu
from paceline.check.lint.values import Value


def check_cuda_in_workers(program: Program, context: Context) -> Iterator[Finding]:
    """CUDA in what forked workers run: a data set's `__getitem__`, a `collate_fn`."""
    if program.has_call(method="set_start_method"):
        return
    reported: set[int] = set()
    for loader in program.calls(DATALOADER):
        if worker_count(loader) < 1 or loader.has_argument(None, "multiprocessing_context"):
            continue
        for call in program.all_calls:
            run = run_by_workers(program, loader, call)
            if run is None or id(run.node) in reported or not uses_cuda(program, call):
                continue
            reported.add(id(run.node))
            what = (
                f"{name_of(run)} uses CUDA, and the loader in {loader.spot} runs it "
                "in forked workers: CUDA cannot be initialised there again"
            )
            fix = "return CPU tensors, and move the batch to the GPU in the training loop"
            yield program.finding("cuda-init-before-fork", call, what, fix, seen=(loader,))


def worker_count(loader: Call) -> int:
    workers = loader.argument(5, "num_workers")
    count = workers.likely(0) if workers is not None else 0
    return count if isinstance(count, int) else 0


def run_by_workers(program: Program, loader: Call, call: Call) -> Function | None:
    """The own function on the way to a call that the loader's workers run."""
    data = loader.argument(0, "dataset") or Value()
    classes = [one.of_class for one in data.origins() if one.of_class is not None]
    given = [loader.argument(6, "collate_fn"), loader.argument(None, "worker_init_fn")]
    collates = [one.function for each in given if each is not None for one in each.any()]
    for frame in call.frames:
        function = frame.function
        if function in collates:
            return function
        if function.name in {"__getitem__", "__iter__"} and function.own_class in classes:
            return function
    return None


def name_of(function: Function) -> str:
    return function.own_class.name if function.own_class is not None else function.name


def uses_cuda(program: Program, call: Call) -> bool:
    """`x.cuda()`, `x.to(device)`, `device="cuda"`, or a model that was put on a GPU."""
    if call.method == "cuda":
        return call.receiver is not None and call.receiver.name is None
    model = call.forward_of
    if model is not None:
        moves = [one for one in program.all_calls if puts_model_on_gpu(one)]
        return any(one.receiver is model for one in moves)
    if call.name == "torch.device":
        return False
    given = call.argument(0, "device") if call.method == "to" else call.argument(None, "device")
    return given is not None and any(is_cuda(one) for one in given.any())


RULES = (check_cuda_in_workers,)
