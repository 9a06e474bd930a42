"""What goes wrong when checkpoints are written and read, what every rank writes, and where."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, Guard
from paceline.check.lint.facts.names import INIT_GROUP, kind_by_name
from paceline.check.lint.facts.program import OWNERS, Program
from paceline.check.lint.facts.source import path_of
from paceline.check.lint.facts.values import Value
from paceline.check.lint.rules.samplers import training_loops

WRITES = frozenset({"torch.save", "numpy.save", "numpy.savez", "safetensors.torch.save_file"})


def check_same_file(program: Program, context: Context) -> Iterator[Finding]:
    """Every rank writes one file at once."""
    if program.framework in OWNERS - {"deepspeed"} or not (
        program.wraps or program.has_call(INIT_GROUP)
    ):
        return
    sizes = [one.argument(2, "world_size") for one in program.calls(INIT_GROUP)]
    if sizes and all(one is not None and one.const == 1 for one in sizes):
        return  # a group of one process
    reported: set[int] = set()
    for call in program.all_calls:
        path = written_path(call)
        if path is None or id(call.node) in reported or kept_to_some(call, path):
            continue
        if call.root and not starts_training(program, call):
            continue
        reported.add(id(call.node))
        what = "every rank writes this file, at the same time and under the same name"
        fix = "write it on rank 0 only (`if dist.get_rank() == 0:`), or name it by the rank"
        yield program.finding("all-ranks-save-same-file", call, what, fix)


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
    if any(one.by_rank or one.alone or asks_who(one) for one in call.guards):
        return True
    decorators = (one for frame in call.frames for one in frame.function.decorators)
    if any(speaks_of_ranks(one.name or one.label) for one in decorators):
        return True
    if any((one.instance or "").startswith("io.") for one in path.any()):
        return True  # memory, of which each process has its own
    return any(one.divergent for one in path.origins())


def is_state(program: Program, loaded: Value) -> bool:
    """Whether what is loaded goes into a model or an optimizer."""
    return any(
        loaded in argument.origins()
        for call in program.calls(method="load_state_dict")
        for argument in call.args
    )


def starts_training(program: Program, call: Call) -> bool:
    """Whether the outermost function of an event that nobody calls sets up the run itself."""
    mine = call.frames[0].function if call.frames else None
    starts = [*program.wraps, *program.calls(INIT_GROUP)]
    return any(one.frames and one.frames[0].function is mine for one in starts)


def check_weights_only(program: Program, context: Context) -> Iterator[Finding]:
    """torch.load refuses what this program saves: more than tensors."""
    version = context.version("torch")
    if version is not None and version < (2, 6):
        return
    saved = [one for one in program.calls("torch.save") if saves_objects(one)]
    if not saved:
        return
    given = saved[0].argument(0, "obj")
    holds_more = given is not None and bool(given.entries)  # no other is a state to load
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
        is_model = path_of(call.node) in places_of(saved[0]) and (
            (holds_more and is_state(program, call.result))
            or kind_by_name(call.result.label) == "model"
        )
        if not is_same and not is_model:
            continue
        what = (
            f"{saved[0].spot} saves a whole object, not only tensors; torch.load refuses "
            "it since torch 2.6"
        )
        fix = "save model.state_dict(), or pass weights_only=False for files that you trust"
        yield program.finding(
            "weights-only-load",
            call,
            what,
            fix,
            seen=saved[:1],
            level=Severity.ERROR if version is not None or only is not None else Severity.WARNING,
        )
        return


def places_of(call: Call) -> set[str | None]:
    """The files that a call is made in and from."""
    before = [one.call.node for one in call.frames if one.call is not None]
    return {path_of(node) for node in (call.node, *before)}


def saves_objects(call: Call) -> bool:
    """Whether a saved value is or holds a model, an optimizer or a namespace itself."""
    given = call.argument(0, "obj")
    if given is None:
        return False
    parts = [given, *(given.entries or {}).values()]
    return any(one.kind in {"model", "optimizer", "namespace"} for one in parts)


def asks_who(guard: Guard) -> bool:
    """Whether a condition speaks of a rank, though reading does not tell which ranks it keeps."""
    test = getattr(guard.node, "test", None)
    return test is not None and speaks_of_ranks(ast.unparse(test))


def speaks_of_ranks(text: str) -> bool:
    text = text.lower().replace("__main__", "")
    return any(word in text for word in ("rank", "main", "master", "primary", "zero", "leader"))


SAVES: dict[str, tuple[int | None, str]] = {
    "torch.save": (1, "f"),
    "safetensors.torch.save_file": (1, "filename"),
    "torch.distributed.checkpoint.save": (None, "checkpoint_id"),
    "torch.distributed.checkpoint.async_save": (None, "checkpoint_id"),
    "torch.distributed.checkpoint.FileSystemWriter": (0, "path"),
    "accelerate.Accelerator.save_state": (0, "output_dir"),
    "deepspeed.DeepSpeedEngine.save_checkpoint": (0, "save_dir"),
    "transformers.TrainingArguments": (0, "output_dir"),
    "lightning.pytorch.callbacks.ModelCheckpoint": (0, "dirpath"),
}
"""Call -> position and keyword of the path that a checkpoint is written to."""

OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/scratch/local", "/mnt/local", "/raid")
"""Folders that each machine has for itself."""

JOINS = frozenset({"os.path.join", "pathlib.Path", "builtins.str", "os.path.expanduser"})

UPLOADS = ("upload_file", "upload_folder", "upload", "push_to_hub", "put", "copytree", "rsync")
"""Methods after which what was written lies elsewhere, too."""


def check_local_disk(program: Program, context: Context) -> Iterator[Finding]:
    """Training state that is saved under a literal path of one machine."""
    trains = program.is_distributed and (training_loops(program) or program.framework)
    if not trains or program.has_call(method=UPLOADS):
        return
    for call in program.all_calls:
        position, keyword = SAVES.get(call.name, (None, ""))
        path = call.argument(position, keyword) if keyword else None
        text = None if path is None else first_text(path)
        folder = next((one for one in OF_ONE_NODE if text and is_below(text, one)), None)
        if folder is None:
            continue
        what = f"checkpoints are written below {folder}, which only one machine has"
        fix = "write to storage that stays and that all nodes see, or copy each checkpoint there"
        yield program.finding("checkpoint-ephemeral", call, what, fix, level=Severity.INFO)
        return


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def first_text(value: Value) -> str | None:
    """The text that a path begins with; None where reading does not tell."""
    for one in value.any():
        text = one.likely()
        if isinstance(text, str):
            return text
        first = None
        if isinstance(one.call, Call) and one.call.name in JOINS and one.call.args:
            first = one.call.args[0]
        elif isinstance(one.node, ast.JoinedStr | ast.BinOp) and one.sources:
            first = one.sources[0]
        if first is not None and first is not one and (found := first_text(first)) is not None:
            return found
    return None


RULES = (
    check_same_file,
    check_weights_only,
    check_local_disk,
)
