"""What `paceline scan` found, for people: one row a program, or every part of each."""

from collections.abc import Iterator
from dataclasses import fields
from os.path import commonpath

from paceline.adapt.inventory import FoundLoop, Inventory
from paceline.adapt.result import Target
from paceline.adapt.scan import Scanned, ScannedFile, outcome_of
from paceline.report.table import format_table
from paceline.units import counted

_PARTS = [field.name for field in fields(Inventory) if field.name not in ("framework", "owner")]
_MOST_LINES = 3
_MOST_WRAPS = 2
"""Most wraps that a row names; `--all` and `--json` have all."""

_SHORT = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "init_process_group": "process group",
}


def format_scan(scanned: Scanned, num_unread: int, *, details: bool) -> Iterator[str]:
    """Lines for a terminal: those that train, wrap or save first; the others are counted."""
    train = [each for each in scanned.files if each.parts.trains]
    single = [each for each in train if outcome_of(each.adapt[Target.DDP]) in ("adapted", "left")]
    yield (
        f"{counted(len(scanned.files), 'program')}: {len(train)} train, {len(single)} of them can "
        "be adapted to many devices"
        + (f"; {counted(num_unread, 'file')} could not be read" if num_unread else "")
    )
    if details:
        for file in scanned.files:
            yield ""
            yield from _details(file)
        return
    shown = [each for each in scanned.files if _has_parts(each.parts)]
    shown.sort(key=lambda each: not each.parts.trains)
    alike = len({each.path.startswith("/") for each in shown}) == 1
    folder = commonpath([each.path for each in shown]) if alike else ""
    rows: list[tuple[str, ...]] = [("file", "framework", "loops at", "adapt", "wrapping")]
    rows += [_row(each, folder) for each in shown]
    if shown:
        yield ""
        yield from format_table(rows, keep=4).splitlines()
    if len(shown) < len(scanned.files):
        yield ""
        yield f"and {counted(len(scanned.files) - len(shown), 'program')} without any of these"


def _has_parts(parts: Inventory) -> bool:
    return bool(parts.loops or parts.optimizers or parts.wrapping or parts.saves)


def _framework(parts: Inventory) -> str:
    names = dict.fromkeys(name for name in (parts.framework, parts.owner) if name)
    return " + ".join(names) or "-"


def _row(file: ScannedFile, folder: str) -> tuple[str, ...]:
    parts = file.parts
    loops = [loop for loop in parts.loops if loop.role == "training"] or parts.loops
    places = list(dict.fromkeys(file.place(loop.line) for loop in loops))
    more = f" +{len(places) - _MOST_LINES}" if len(places) > _MOST_LINES else ""
    wraps = dict.fromkeys(each.what.rpartition(".")[2] for each in parts.wrapping)
    return (
        file.path.removeprefix(f"{folder}/") if folder else file.path,
        _framework(parts),
        ", ".join(places[:_MOST_LINES]) + more or "-",
        _verdict(file),
        ", ".join(_SHORT.get(each, each) for each in list(wraps)[:_MOST_WRAPS]) or "-",
    )


def _verdict(file: ScannedFile) -> str:
    """The answer for DDP; for the others where they differ."""
    first = file.adapt[Target.DDP]
    outcome = outcome_of(first)
    if outcome == "refused":
        return f"no: {first.left[0].what}" if first.left else "no"
    if outcome == "left":
        return f"yes; {counted(len(first.left), 'place')} left to you"
    return "adapted already" if outcome == "already" else "yes"


def _details(file: ScannedFile) -> Iterator[str]:
    parts = file.parts
    yield f"{file.path}: {_framework(parts)}{', trains' if parts.trains else ''}"
    rows: list[tuple[str, ...]] = []
    for name in _PARTS:
        for number, each in enumerate(getattr(parts, name)):
            head = f"  {name if number == 0 else ''}"
            if isinstance(each, FoundLoop):
                place = f"{file.place(each.line)}-{file.place(each.end_line).rpartition(':')[2]}"
                rows.append((head, place, each.role, each.over))
            else:
                rows.append((head, file.place(each.line), each.what, each.text[:60]))
    rows += [
        ("  started by", f"{each.path}:{each.line}", "", each.text[:60]) for each in file.started_by
    ]
    if rows:
        yield from format_table(rows).splitlines()
    yield from _adapt(file)


def _adapt(file: ScannedFile) -> Iterator[str]:
    """What `adapt` would do; forms with the same answer together."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for to, adapted in file.adapt.items():
        left = tuple(
            f"{'' if file.cells else f'line {each.line}: '}{each.what}: {each.why}"
            for each in adapted.left
        )
        outcome = outcome_of(adapted)
        word = {
            "refused": "no",
            "already": "has this form already",
            "left": f"yes, {counted(len(adapted.done), 'change')}; left to you:",
            "adapted": f"yes, {counted(len(adapted.done), 'change')}",
        }[outcome]
        together.setdefault((word, left), []).append(str(to))
    for (word, left), targets in together.items():
        yield f"  adapt to {', '.join(targets)}: {word}"
        yield from (f"    {text}" for text in left)
