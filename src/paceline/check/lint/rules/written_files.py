"""Plain files that every rank opens for writing under one name."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import INIT_GROUP
from paceline.check.lint.program import Program
from paceline.check.lint.rules.saving import OWNED, kept_to_some
from paceline.check.lint.values import UNKNOWN, Value

STARTS = (
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.Process",
    "multiprocessing.Process",
    "torch.distributed.launcher.api.elastic_launch",
)
"""Calls after which there are several processes; what stands before runs once."""

JOINS = frozenset({"os.path.join", "pathlib.Path", "builtins.str", "os.path.expanduser"})

NO_FILES = ("/dev/", "/proc/", "/sys/")


def check_same_plain_file(program: Program, context: Context) -> Iterator[Finding]:
    """`open("metrics.json", "w")` on every rank: one truncates what another has written."""
    if program.framework in OWNED or not (program.wraps or program.has_call(INIT_GROUP)):
        return
    if program.has_call(*STARTS):
        return
    reported: set[int] = set()
    for call in program.all_calls:
        path = written(call)
        if path is None or call.root or id(call.node) in reported or not is_one_path(path):
            continue
        if kept_to_some(call, path):
            continue
        reported.add(id(call.node))
        yield program.finding(
            "all-ranks-save-same-file",
            Severity.WARNING,
            call,
            what="every rank writes this file, at the same time and under the same name",
            fix="write it on rank 0 only (`if dist.get_rank() == 0:`), or name it by the rank",
        )


def written(call: Call) -> Value | None:
    """The path that a call writes anew."""
    if call.name == "builtins.open":
        mode = call.argument(1, "mode")
        writes = mode is not None and isinstance(mode.const, str) and mode.const[:1] == "w"
        return call.argument(0, "file") if writes else None
    if call.method in {"write_text", "write_bytes"} and call.receiver is not None:
        return call.receiver if call.receiver.has_kind("path") else None
    return None


def is_one_path(path: Value) -> bool:
    """Whether every rank surely has the same path: of literals and options of the command line."""
    texts = []
    for one in path.origins():
        if one.divergent or one.options:
            return False
        if isinstance(one.call, Call) and one.call.name not in JOINS:
            return False
        text = one.likely(UNKNOWN)
        if isinstance(text, str):
            texts.append(text)
        elif text is UNKNOWN and not one.sources and one.kind is None and not is_option(one):
            return False
    return bool(texts) and not any(one.startswith(NO_FILES) for one in texts)


def is_option(value: Value) -> bool:
    return value.label.startswith("args.") or value.const is not UNKNOWN or value.name is not None


RULES = (check_same_plain_file,)
