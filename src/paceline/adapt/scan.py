"""What the programs of a tree have of a training, and what `adapt` would do with each.

Files are handed over as bytes; nothing is opened. A broken file is reported and ends nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from paceline.adapt.adapt import judge
from paceline.adapt.inventory import Inventory, inventory
from paceline.adapt.notebook import read_notebook
from paceline.adapt.result import Adapted, Target
from paceline.check.lint.across import Start, names_file, starts_in
from paceline.check.lint.configs import Config, read_config
from paceline.check.lint.context import Context
from paceline.check.lint.facts.files import Files
from paceline.check.lint.facts.program import read_program
from paceline.check.lint.facts.source import Unreadable
from paceline.check.lint.judged import Unread
from paceline.check.lint.lint import is_python


class OutOfTime(Exception):
    """Raised in the middle of a file whose time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedBy:
    """A line of another file that starts this one."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedFile:
    """One program."""

    path: str
    parts: Inventory
    adapt: Mapping[Target, Adapted]
    """What `paceline adapt --to` would do."""

    started_by: tuple[StartedBy, ...] = ()
    cells: tuple[tuple[int, int], ...] = ()
    """Cell and line in it for each line of a notebook's code; empty for a script."""

    def place(self, line: int) -> str:
        """`41`, or `cell 3:7` in a notebook."""
        if not self.cells:
            return str(line)
        cell, inner = self.cells[min(line, len(self.cells)) - 1]
        return f"cell {cell}:{inner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """A tree."""

    files: tuple[ScannedFile, ...]
    unread: tuple[Unread, ...]


def scan_files(
    sources: Mapping[str, bytes], bounded: Callable[[], AbstractContextManager[None]]
) -> Scanned:
    """Every program of these files; configurations are read for the lines that start one.

    Args:
        sources: Path -> content.
        bounded: Makes what surrounds the reading of one file; it may raise `OutOfTime` there.
    """
    unread: list[Unread] = []
    texts: dict[str, bytes | str] = {}
    cells: dict[str, tuple[tuple[int, int], ...]] = {}
    configs: list[Config] = []
    for path, source in sources.items():
        try:
            if path.endswith(".ipynb"):
                texts[path], cells[path] = read_notebook(source.decode())
            elif is_python(path, source):
                texts[path] = source
            elif b"\0" not in source[:8192]:
                config = read_config(path, source.decode(errors="replace"))
                configs += [config] if config is not None else []
        except Unreadable as error:
            unread.append(Unread(path=path, line=error.line, what=str(error)))
        except UnicodeDecodeError:
            unread.append(Unread(path=path, line=None, what="it is no UTF-8 text"))
    files, starts = Files(texts), starts_in(configs, Context())
    found = []
    for path, text in texts.items():
        try:
            with bounded():
                program = read_program(path, text, files)
                asked = sources[path].decode(errors="replace") if path in cells else program.text
                found.append(
                    ScannedFile(
                        path=path,
                        parts=inventory(program),
                        adapt=judge(asked, name=path.rpartition("/")[2]),
                        started_by=tuple(_starts_of(path, starts)),
                        cells=cells.get(path, ()),
                    )
                )
        except Unreadable as error:
            places = cells.get(path)
            if places and error.line:
                cell, inner = places[min(error.line, len(places)) - 1]
                what = f"cell {cell}, line {inner}: {error}"
                unread.append(Unread(path=path, line=None, what=what))
            else:
                unread.append(Unread(path=path, line=error.line, what=str(error)))
        except OutOfTime as error:
            unread.append(Unread(path=path, line=None, what=str(error)))
    return Scanned(files=tuple(found), unread=tuple(unread))


def _starts_of(path: str, starts: Sequence[Start]) -> Iterator[StartedBy]:
    for start in starts:
        if names_file(start.launch, path):
            text = " ".join(word.text for word in start.launch.words)
            yield StartedBy(path=start.launch.path, line=start.launch.line, text=text)


def scanned_data(scanned: Scanned, unread: Sequence[Unread]) -> dict[str, Any]:
    """What `paceline scan --json` prints.

    Args:
        unread: What could not be read, also of files that were never handed over.
    """
    return {
        "files": [_file_data(each) for each in scanned.files],
        "unread": [{"path": each.path, "line": each.line, "what": each.what} for each in unread],
    }


def _file_data(file: ScannedFile) -> dict[str, Any]:
    parts = asdict(file.parts)
    if file.cells:
        for items in parts.values():
            for item in items if isinstance(items, tuple) else ():
                item["cell"], item["cell_line"] = file.cells[item["line"] - 1]
    return {
        "path": file.path,
        "kind": "notebook" if file.cells else "python",
        "trains": file.parts.trains,
        **parts,
        "started_by": [asdict(each) for each in file.started_by],
        "adapt": {
            str(to): {
                "outcome": outcome_of(adapted),
                "done": [asdict(each) for each in adapted.done],
                "left": [asdict(each) for each in adapted.left],
                "start": adapted.start,
            }
            for to, adapted in file.adapt.items()
        },
    }


def outcome_of(adapted: Adapted) -> str:
    """`refused`, `already`, `left` where something is left to a person, or `adapted`."""
    if adapted.refused or adapted.already:
        return "refused" if adapted.refused else "already"
    return "left" if adapted.left else "adapted"
