"""Read the catalog's own TOML files into frozen dataclasses, once a process.

A catalog file of the reader's own is merged over them in `user.py`.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from paceline.catalog._rows import checked_row, make_row, with_likes
from paceline.catalog.accelerator import ACCELERATOR_KEYS, Accelerator, make_accelerator
from paceline.catalog.link import Link
from paceline.catalog.mig import slice_of, split_slice

_T = TypeVar("_T")


@cache
def load_accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator of the built-in catalog by its name."""
    file = "accelerators.toml"
    return {
        name: make_accelerator(name, checked_row(ACCELERATOR_KEYS, row, where=name, file=file))
        for name, row in read_shipped(file).items()
    }


@cache
def load_links() -> Mapping[str, Link]:
    """Every link of the built-in catalog by its name."""
    return read_rows("links.toml", Link)


def accelerator_named(name: str, accelerators: Mapping[str, Accelerator]) -> Accelerator | None:
    """The accelerator, or the slice of one, that a name means in any spelling; None without one.

    >>> accelerator_named("h100 1g.10gb", load_accelerators()).name
    'H100-SXM 1g.10gb'
    """
    if name in accelerators:
        return accelerators[name]
    spellings = accelerator_spellings(accelerators)
    by_lower = {spelling.lower(): known for spelling, known in spellings.items()}
    for spelled, profile in dict.fromkeys(((name, None), split_slice(name))):
        found = by_lower.get(spelled.strip().lower()) or by_smi_name(spelled, accelerators)
        if found is not None:
            return (
                accelerators[found] if profile is None else slice_of(accelerators[found], profile)
            )
    return None


def by_smi_name(smi_name: str, accelerators: Mapping[str, Accelerator]) -> str | None:
    bare = _bare(smi_name)
    for name, accelerator in accelerators.items():
        if any(bare == _bare(each) for each in accelerator.smi_names):
            return name
    return None


def _bare(smi_name: str) -> str:
    """The model alone, in small letters: tools differ in the maker's words and in capitals."""
    text = smi_name.strip().lower()
    bracket = re.fullmatch(r"[^\[]*\[([^\]]+)\]", text)  # as the PCI database has it
    words = (bracket[1] if bracket else text).split()
    while words and words[0] in ("nvidia", "tesla", "amd", "instinct"):
        words = words[1:]
    return " ".join(words)


def accelerator_spellings(accelerators: Mapping[str, Accelerator]) -> dict[str, str]:
    """Every spelling that is accepted -> the name it stands for; names win over aliases."""
    spellings = {alias: name for name, known in accelerators.items() for alias in known.aliases}
    return spellings | {name: name for name in accelerators}


@cache
def read_shipped(name: str) -> dict[str, Any]:
    """The rows of a TOML file of the catalog, whole: what `like` takes over is in them."""
    return _rows_of((files("paceline.catalog") / name).read_text(encoding="utf-8"))


def _rows_of(text: str) -> dict[str, Any]:
    return with_likes(tomllib.loads(text))


def read_rows(
    file: str,
    kind: type[_T],
    *,
    key: str | None = "name",
    named: Callable[[str], Any] = str,
) -> dict[str, _T]:
    """Every row of a shipped file as its dataclass, by the row's name.

    Args:
        file: In the catalog's folder.
        key: The field that has the row's name; None where there is none.
        named: Turns the row's name into the field's type.

    Raises:
        ValueError: What is wrong with a row; a key that is no field is refused.
    """
    return {
        name: make_row(kind, row, where=name, file=file, **({key: named(name)} if key else {}))
        for name, row in read_shipped(file).items()
    }


def read_key(
    file: str, key: str, kind: type[_T], made: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, _T]:
    """The table at one key of every row of a shipped file that has it, as its dataclass, by the
    row's name. `like` in it names an earlier row; `made` gives the fields.

    Raises:
        ValueError: What is wrong with a row; a key that is no field is refused.
    """
    rows = with_likes({name: row[key] for name, row in read_shipped(file).items() if key in row})
    return {
        name: make_row(kind, made(row), where=f"{name}.{key}", file=file)
        for name, row in rows.items()
    }


def read_folder(name: str, *, package: str = "catalog") -> dict[str, tuple[str, Any]]:
    """Every row of the TOML files of a folder, with the name of its file.

    Args:
        name: The folder, in the package's.
        package: The catalog, or another package of Paceline, which is not imported.

    Raises:
        ValueError: Two rows have one name.
    """
    found: dict[str, tuple[str, Any]] = {}
    folder = files("paceline") / package / name
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        stem, _, ending = entry.name.rpartition(".")
        rows = _rows_of(entry.read_text(encoding="utf-8")) if ending == "toml" else {}
        for row_name, row in rows.items():
            if row_name in found:
                raise ValueError(f"{row_name} is in {entry.name} and in {found[row_name][0]}.toml")
            found[row_name] = stem, row
    return found
