"""Read the catalog's own TOML files into frozen dataclasses, once a process.

A catalog file of the reader's own is merged over them in `user.py`.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.catalog._rows import checked_row, make_row, no_such, with_likes
from paceline.catalog.accelerator import ACCELERATOR_KEYS, Accelerator, make_accelerator
from paceline.catalog.link import Link
from paceline.catalog.mig import num_slices, slice_of, split_slice
from paceline.errors import JobError, Problem

if TYPE_CHECKING:
    from paceline.catalog.user import Catalog

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


def _or_own(unknown: Problem) -> Problem:
    own = "describe it in your own catalog file: `paceline catalog --write paceline-catalog.toml`"
    return replace(unknown, fix=f"{unknown.fix}; or {own}")


def find_accelerator(name: str, *, where: str, catalog: "Catalog | None" = None) -> Accelerator:
    """The accelerator of that name or alias, in any case, or as its own tool reports it.

    Args:
        name: As a person, a data sheet or `nvidia-smi` writes it: `h100`, `A100-SXM4-80GB`,
            `NVIDIA H100 80GB HBM3`.
        where: Its place in the job, for the message.
        catalog: Where to look; the built-in one when left out.

    Raises:
        JobError: `T001`, naming the nearest one.
    """
    accelerators = load_accelerators() if catalog is None else catalog.accelerators
    if (found := accelerator_named(name, accelerators)) is not None:
        return found
    card, profile = split_slice(name)
    whole = accelerator_named(card, accelerators) if profile is not None else None
    if whole is not None:
        raise JobError(_no_such_slice(whole, profile, where))
    spellings = accelerator_spellings(accelerators)
    raise JobError(_or_own(no_such("T001", "accelerator", name, spellings, where)))


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
        found = by_lower.get(spelled.strip().lower()) or _by_smi_name(spelled, accelerators)
        if found is not None:
            return (
                accelerators[found] if profile is None else slice_of(accelerators[found], profile)
            )
    return None


def _no_such_slice(card: Accelerator, profile: str | None, where: str) -> Problem:
    has = ", ".join(f"{each} ({num_slices(card, each)} of it)" for each in card.mig_profiles)
    return Problem(
        code="T001",
        what=f"{card.name} has no slice (MIG) `{profile}`",
        where=where,
        fix=f"choose one of its own: {has}; `nvidia-smi -L` lists those of a machine"
        if has
        else f"name the whole card, {card.name}: the catalog knows no slices of it",
    )


def find_link(name: str, *, where: str, catalog: "Catalog | None" = None) -> Link:
    """The link of that name, in any case.

    Raises:
        JobError: `T004`, naming the nearest one.
    """
    links = load_links() if catalog is None else catalog.links
    found = {known.lower(): link for known, link in links.items()}.get(name.strip().lower())
    if found is None:
        unknown = no_such("T004", "link", name, {each: each for each in links}, where)
        raise JobError(_or_own(unknown))
    return found


def catalog_name(smi_name: str, catalog: "Catalog | None" = None) -> str | None:
    """The catalog's name of a GPU as its own tool reports it, or None when it is not in there.

    >>> catalog_name("NVIDIA H100 80GB HBM3"), catalog_name("Aqua Vanjaram [Instinct MI300X]")
    ('H100-SXM', 'MI300X')
    """
    accelerators = load_accelerators() if catalog is None else catalog.accelerators
    card, profile = split_slice(smi_name)
    found = _by_smi_name(card, accelerators)
    if found is None or profile is None:
        return found
    part = slice_of(accelerators[found], profile)
    return None if part is None else part.name


def _by_smi_name(smi_name: str, accelerators: Mapping[str, Accelerator]) -> str | None:
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
