"""What goes wrong with worker processes: forks after threads or CUDA, time limits, open files."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Class, Function
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.groups import is_cuda, puts_model_on_gpu
from paceline.check.lint.rules.streams import worker_count
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
            yield program.finding(
                "cuda-init-before-fork",
                Severity.ERROR,
                call,
                what=(
                    f"{name_of(run)} uses CUDA, and the loader in line {loader.line} runs it "
                    "in forked workers: CUDA cannot be initialised there again"
                ),
                fix="return CPU tensors, and move the batch to the GPU in the training loop",
                seen=(loader,),
            )


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


def check_tokenizer_threads(program: Program, context: Context) -> Iterator[Finding]:
    """`TOKENIZERS_PARALLELISM=true` with loader workers: they may dead-lock after the fork."""
    if not any(worker_count(one) > 0 for one in program.calls(DATALOADER)):
        return
    for assign in program.assigns:
        if assign.owner is None or assign.owner.name != "os.environ":
            continue
        if "TOKENIZERS_PARALLELISM" in assign.target and assign.value.const in {"true", "1"}:
            yield program.finding(
                "tokenizers-fork",
                Severity.INFO,
                assign,
                what="the tokenizer's threads are kept on, and the loader forks workers after them",
                fix='set it to "false", or tokenize before training',
            )


def check_tokenized_before_fork(program: Program, context: Context) -> Iterator[Finding]:
    """A fast tokenizer that has used its threads before a loader forks its workers."""
    if program.mentions("tokenizers_parallelism", "set_start_method"):
        return
    loaders = [one for one in program.calls(DATALOADER) if worker_count(one) > 0]
    loaders = [one for one in loaders if not one.has_argument(None, "multiprocessing_context")]
    for call in program.all_calls:
        if not encodes_many(call):
            continue
        later = [one for one in loaders if one.root == call.root and one.order > call.order]
        if not later:
            continue
        yield program.finding(
            "tokenizers-fork",
            Severity.INFO,
            call,
            what=(
                f"the tokenizer has used its threads when the loader in line {later[0].line} forks "
                "its workers: it goes on with one thread, and warns in each of them"
            ),
            fix='os.environ["TOKENIZERS_PARALLELISM"] = "false", or tokenize beforehand',
            seen=later[:1],
        )
        return


def encodes_many(call: Call) -> bool:
    """`tokenizer(texts)`, `data.map(tokenize, batched=True)`: what Rust's threads share."""
    tokenizer = call.callee if call.method is None else call.receiver
    if tokenizer is None or not tokenizer.has_kind("tokenizer"):
        return False
    if call.method not in {None, "batch_encode_plus", "encode_batch"}:
        return False
    first = call.argument(0, "text")
    return first is not None and (first.items is not None or first.attribute == "comprehension")


SHORT_LIMIT_S = 10
"""A guess: the first batch waits for the workers' imports, which take as long on a busy disk."""

NETWORK = (
    "requests.",
    "urllib.request.",
    "boto3.",
    "fsspec.",
    "s3fs.",
    "gcsfs.",
    "smart_open.",
    "google.cloud.storage.",
    "huggingface_hub.",
)
"""Packages whose calls read over a network."""


def check_time_limit(program: Program, context: Context) -> Iterator[Finding]:
    """A loader's time limit: without workers, too short, or none where workers read over a net."""
    for call in program.calls(DATALOADER):
        given, workers = call.argument(9, "timeout"), call.argument(5, "num_workers")
        limit = given.const if given is not None else 0
        if call.open_ended or not isinstance(limit, int | float):
            continue
        if limit > 0 and (workers is None or workers.const == 0):
            yield limit_finding(
                program,
                call,
                Severity.ERROR,
                "a time limit needs worker processes: without num_workers the loader's first "
                "batch raises AssertionError",
                "num_workers=4, or leave timeout out",
            )
        elif 0 < limit <= SHORT_LIMIT_S:
            yield limit_finding(
                program,
                call,
                Severity.WARNING,
                f"a batch that comes later than {limit:g} s, as the first may, ends the run",
                "timeout=120 or more",
            )
        elif limit == 0 and worker_count(call) > 0:
            read = network_read(program, call)
            if read is not None:
                yield limit_finding(
                    program,
                    call,
                    Severity.INFO,
                    f"workers read over a network (line {read.lineno}), and without a time limit a "
                    "read that never ends is a silent hang",
                    "timeout=600, or a time limit of each read",
                    read,
                )


def limit_finding(
    program: Program, call: Call, severity: Severity, what: str, fix: str, *seen: ast.AST
) -> Finding:
    at = call.keyword_nodes.get("timeout", call.node)
    return program.finding("dataloader-timeout", severity, at, what=what, fix=fix, seen=seen)


def network_read(program: Program, loader: Call) -> ast.expr | None:
    """Where the loader's own data set reads over a network without a limit of its own."""
    data = loader.argument(0, "dataset") or Value()
    owns: set[Class] = {one.of_class for one in data.origins() if one.of_class is not None}
    for call in program.all_calls:
        function = call.function
        if function is None or function.own_class not in owns or function.name == "__init__":
            continue
        if call.name.startswith(NETWORK) and not call.has_argument(None, "timeout"):
            assert isinstance(call.node, ast.expr)
            return call.node
    return None


SOFT_LIMIT = 1024
"""Open files that a process may have on most Linux systems, unless it asks for more."""


def check_open_files(program: Program, context: Context) -> Iterator[Finding]:
    """More batches on their way than a process may have open files: each tensor is one."""
    if program.mentions("set_sharing_strategy", "rlimit_nofile"):
        return
    for call in program.calls(DATALOADER):
        workers, ahead = worker_count(call), call.argument(None, "prefetch_factor")
        prefetch = ahead.likely(2) if ahead is not None else 2
        if not isinstance(prefetch, int) or workers * prefetch * 2 <= SOFT_LIMIT:
            continue
        yield program.finding(
            "too-many-open-files",
            Severity.WARNING,
            call,
            what=(
                f"{workers} workers x {prefetch} batches ahead x 2 tensors or more are open files "
                f"of this process, which may have {SOFT_LIMIT}"
            ),
            fix='torch.multiprocessing.set_sharing_strategy("file_system"), or fewer ahead',
        )


RULES = (
    check_cuda_in_workers,
    check_tokenizer_threads,
    check_tokenized_before_fork,
    check_time_limit,
    check_open_files,
)
