"""What goes wrong when checkpoints are written and read, and what every rank writes and says."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Guard, Loop
from paceline.check.lint.names import INIT_GROUP, kind_by_name
from paceline.check.lint.program import Program
from paceline.check.lint.rules.accumulation import counts
from paceline.check.lint.rules.samplers import epoch_loop, training_loops
from paceline.check.lint.values import RANK, UNKNOWN, Value

WRITES = frozenset({"torch.save", "numpy.save", "numpy.savez", "safetensors.torch.save_file"})
OWNED = frozenset({"accelerate", "fabric", "lightning", "transformers", "ray"})


def check_same_file(program: Program, context: Context) -> Iterator[Finding]:
    """Every rank writes one file at once."""
    if program.framework in OWNED or not (program.wraps or program.has_call(INIT_GROUP)):
        return
    reported: set[int] = set()
    for call in program.all_calls:
        path = written_path(call)
        if path is None or id(call.node) in reported or kept_to_some(call, path):
            continue
        if call.root and not starts_training(program, call):
            continue
        reported.add(id(call.node))
        yield program.finding(
            "all-ranks-save-same-file",
            Severity.ERROR,
            call,
            what="every rank writes this file, at the same time and under the same name",
            fix="write it on rank 0 only (`if dist.get_rank() == 0:`), or name it by the rank",
        )


def written_path(call: Call) -> Value | None:
    if call.name in WRITES:
        position = 0 if call.name.startswith("numpy") else 1
        return call.argument(position, "f", "filename", "file")
    if call.method == "save_pretrained" and call.receiver is not None:
        if call.argument(None, "is_main_process") is not None:
            return None
        return call.argument(0, "save_directory") if call.receiver.has_kind("model") else None
    return None


def kept_to_some(call: Call, path: Value) -> bool:
    """Whether a condition on the rank leads there, or the path holds the rank."""
    if any(one.by_rank or one.alone for one in call.guards):
        return True
    if any(one.divergent for one in path.origins()):
        return True
    return any((value.instance or "").endswith("main_process_first") for value in call.withs)


MOVES = ("replace", "rename", "renames", "move")


def check_overwritten(program: Program, context: Context) -> Iterator[Finding]:
    """The one checkpoint is written over itself: a crash meanwhile leaves none that is whole."""
    if program.framework in OWNED or not (program.wraps or program.has_call(INIT_GROUP)):
        return
    if program.has_call(method=MOVES):
        return
    training = training_loops(program)
    around = {one for loop in training for one in (loop, epoch_loop(program, loop)) if one}
    for call in program.calls("torch.save"):
        path = call.argument(1, "f")
        if path is None or not any(one in around for one in call.loops):
            continue
        if path.const is UNKNOWN and not one_name(path):
            continue
        yield program.finding(
            "checkpoint-truncated",
            Severity.INFO,
            call,
            what="each save writes over the one before: a job that is killed meanwhile has neither",
            fix='torch.save(state, f"{path}.new"); os.replace(f"{path}.new", path)',
        )
        return


def one_name(path: Value) -> bool:
    """Whether a path is surely the same in each iteration: of names and literals alone."""
    origins = list(path.origins())
    if any(one.kind == "counter" or one.call is not None or one.divergent for one in origins):
        return False
    return any(isinstance(one.likely(), str) for one in origins)


def check_map_location(program: Program, context: Context) -> Iterator[Finding]:
    """Tensors that were saved from GPU 0, read back by every rank to where they were: GPU 0."""
    if program.framework in OWNED or not (program.wraps or program.has_call(INIT_GROUP)):
        return
    saved = [one for one in program.calls("torch.save") if saves_from_gpu(program, one)]
    loads = program.calls("torch.load")
    if not saved or any(one.has_argument(1, "map_location") for one in loads):
        return
    for call in loads:
        path = call.argument(0, "f")
        if path is not None and kept_to_some(call, path):
            continue  # each rank reads what it saved, from its own GPU
        if on_context_device(call) or not is_state(program, call.result):
            continue
        yield program.finding(
            "missing-set-device",
            Severity.INFO,
            call,
            what=(
                f"without map_location the tensors that rank 0 saves in line {saved[0].line} come "
                "back to its GPU: every process puts a copy on GPU 0"
            ),
            fix='torch.load(path, map_location="cpu")',
            seen=saved[:1],
        )
        return


def check_file_of_rank(program: Program, context: Context) -> Iterator[Finding]:
    """A sharded model's state in a file for each rank, loaded again by the same rank."""
    if program.framework in OWNED:
        return
    saved = [
        one
        for one in program.calls("torch.save")
        if named_by_rank(one.argument(1, "f")) and holds_sharded_state(one)
    ]
    if not saved:
        return
    for call in program.calls("torch.load"):
        if not named_by_rank(call.argument(0, "f")) or not is_state(program, call.result):
            continue
        yield program.finding(
            "ckpt-world-size-mismatch",
            Severity.WARNING,
            call,
            what=(
                f"line {saved[0].line} saves a file for each rank of a sharded model: this loads "
                "only on as many ranks as saved it"
            ),
            fix="torch.distributed.checkpoint.save and load with get_state_dict and set_state_dict",
            seen=saved[:1],
        )
        return


def named_by_rank(path: Value | None) -> bool:
    return path is not None and any(RANK in one.taints for one in path.origins())


def holds_sharded_state(call: Call) -> bool:
    """Whether what is saved is, or holds, `state_dict()` of a model that FSDP sharded."""
    given = call.argument(0, "obj")
    parts = [given, *(given.entries or {}).values()] if given is not None else []
    for one in (origin for part in parts for origin in part.origins()):
        made = one.call
        if not isinstance(made, Call) or made.receiver is None:
            continue
        if made.method == "state_dict" and made.receiver.wrapped_by("fsdp1", "fsdp2"):
            return True
    return False


def is_state(program: Program, loaded: Value) -> bool:
    """Whether what is loaded goes into a model or an optimizer."""
    return any(
        loaded in argument.origins()
        for call in program.calls(method="load_state_dict")
        for argument in call.args
    )


def on_context_device(call: Call) -> bool:
    return any((one.instance or "").startswith("torch.device") for one in call.withs)


def saves_from_gpu(program: Program, call: Call) -> bool:
    """Whether what is saved holds the state of a wrapped model that was put on a GPU."""
    given = call.argument(0, "obj")
    if given is None or not program.mentions("cuda"):
        return False
    inner = {one for wrap in program.wraps for one in wrap.result.origins()}
    for one in given.origins():
        made = one.call
        if not isinstance(made, Call) or made.receiver is None:
            continue
        if made.method == "cpu":
            return False
        if made.method == "state_dict" and inner & set(made.receiver.any()):
            return True
    return False


def starts_training(program: Program, call: Call) -> bool:
    """Whether the outermost function of an event that nobody calls sets up the run itself."""
    mine = call.frames[0].function if call.frames else None
    starts = [*program.wraps, *program.calls(INIT_GROUP)]
    return any(one.frames and one.frames[0].function is mine for one in starts)


def check_resume(program: Program, context: Context) -> Iterator[Finding]:
    """Training state is loaded, and the loop over epochs begins at 0 all the same."""
    loaded = [one for one in program.calls(method="load_state_dict") if is_optimizer(one.receiver)]
    loads = program.calls("torch.load")
    if not loaded or not loads:
        return
    for loop in training_loops(program):
        epochs = epoch_loop(program, loop)
        if epochs is None or epochs.over is None or not epochs.counter:
            continue
        begins = epochs.over.sources
        if any(one.call in loads for value in begins for one in value.origins()):
            continue
        if len(begins) > 1 and begins[0].const is UNKNOWN:
            continue
        if skips_ahead(program, epochs, loads):
            continue
        yield program.finding(
            "resume-repeats-data",
            Severity.INFO,
            epochs,
            what=(
                f"line {loaded[0].line} resumes the optimizer, and this loop starts at epoch 0 "
                "again: the data is repeated and schedules start over"
            ),
            fix="save the epoch in the checkpoint and start at range(checkpoint['epoch'] + 1, ...)",
            seen=loaded[:1],
        )
        return


def is_optimizer(receiver: Value | None) -> bool:
    return receiver is not None and receiver.has_kind("optimizer")


def skips_ahead(program: Program, epochs: Loop, loads: list[Call]) -> bool:
    """Whether a condition in the loop compares with what was loaded."""
    for event in program.events:
        if epochs in event.loops:
            for guard in event.guards:
                if any(one.call in loads for one in guard.test.origins()):
                    return True
    return False


def check_weights_only(program: Program, context: Context) -> Iterator[Finding]:
    """torch.load refuses what this program saves: more than tensors."""
    version = context.version("torch")
    if version is not None and version < (2, 6):
        return
    saved = [one for one in program.calls("torch.save") if saves_objects(one)]
    if not saved:
        return
    for call in program.calls("torch.load"):
        only = call.argument(None, "weights_only")
        if call.open_ended or (only is not None and only.const is not True):
            continue
        if any((one.instance or "").endswith("safe_globals") for one in call.withs):
            continue
        path, written = call.argument(0, "f"), saved[0].argument(1, "f")
        is_same = path is written or (
            path and written and path.const and path.const == written.const
        )
        is_model = is_state(program, call.result) or kind_by_name(call.result.label) == "model"
        if not is_same and not is_model:
            continue
        yield program.finding(
            "weights-only-load",
            Severity.ERROR if version is not None or only is not None else Severity.WARNING,
            call,
            what=(
                f"line {saved[0].line} saves a whole object, not only tensors; torch.load refuses "
                "it since torch 2.6"
            ),
            fix="save model.state_dict(), or pass weights_only=False for files that you trust",
            seen=saved[:1],
        )
        return


def saves_objects(call: Call) -> bool:
    """Whether a saved value is or holds a model, an optimizer or a namespace itself."""
    given = call.argument(0, "obj")
    if given is None:
        return False
    parts = [given, *(given.entries or {}).values()]
    return any(one.kind in {"model", "optimizer", "namespace"} for one in parts)


TRACKERS = frozenset(
    {
        "wandb.init",
        "torch.utils.tensorboard.SummaryWriter",
        "tensorboardX.SummaryWriter",
        "mlflow.start_run",
        "comet_ml.Experiment",
        "neptune.init_run",
    }
)


def asks_who(guard: Guard) -> bool:
    """Whether a condition speaks of a rank, though reading does not tell which ranks it keeps."""
    test = getattr(guard.node, "test", None)
    text = ast.unparse(test).lower().replace("__main__", "") if test is not None else ""
    return any(word in text for word in ("rank", "main", "master", "primary", "zero", "leader"))


def check_trackers(program: Program, context: Context) -> Iterator[Finding]:
    """Every rank opens a run of its own at the tracker, or prints every step."""
    if not (program.wraps or program.has_call(INIT_GROUP)) or program.framework in OWNED:
        return
    for call in program.calls(*TRACKERS):
        inputs = (*call.args, *call.kwargs.values())
        if any(one.by_rank or one.alone or asks_who(one) for one in call.guards):
            continue
        if any(RANK in one.taints for one in inputs):
            continue
        if "group" in call.kwargs or (call.root and not starts_training(program, call)):
            continue
        yield program.finding(
            "rank0-logging-missing",
            Severity.WARNING,
            call,
            what="every rank opens a run of its own here",
            fix="open it on rank 0 only",
        )
    training = training_loops(program)
    for call in program.calls("builtins.print"):
        if not any(one in training for one in call.loops):
            continue
        if any(one.by_rank for one in call.guards):
            continue
        if any(RANK in one.taints for one in call.args):
            continue
        yield program.finding(
            "rank0-logging-missing",
            Severity.INFO,
            call,
            what="every rank prints this in its training loop",
            fix="print on rank 0 only",
        )
        return


def check_host_sync(program: Program, context: Context) -> Iterator[Finding]:
    """A value is fetched from the GPU in every step of training."""
    training = training_loops(program)
    if not program.is_distributed:
        return
    for call in program.calls(method=("item", "tolist", "numpy")):
        if not any(one in training for one in call.loops):
            continue
        if call.receiver is None or not call.receiver.taints:
            continue
        if any(counts(one.test) for one in call.guards) or any(one.by_rank for one in call.guards):
            continue
        yield program.finding(
            "host-sync-in-loop",
            Severity.INFO,
            call,
            what=f".{call.method}() in every step waits until the GPU has caught up",
            fix="do it every few hundred steps, or keep a running sum on the GPU",
        )
        return


RULES = (
    check_same_file,
    check_overwritten,
    check_map_location,
    check_file_of_rank,
    check_resume,
    check_weights_only,
    check_trackers,
    check_host_sync,
)
