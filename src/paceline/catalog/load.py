"""Read the catalog's own TOML files into frozen dataclasses, once a process.

A catalog file of the reader's own is merged over them in `user.py`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from paceline.catalog._rows import no_such, read_row, with_likes
from paceline.catalog.accelerator import ACCELERATOR_KEYS, Accelerator, make_accelerator
from paceline.catalog.link import LINK_KEYS, Link, make_link
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.catalog.user import Catalog


@cache
def load_accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator of the built-in catalog by its name."""
    return {
        name: make_accelerator(name, read_row(ACCELERATOR_KEYS, row, where=name, file="")[0])
        for name, row in read_shipped("accelerators.toml").items()
    }


@cache
def load_links() -> Mapping[str, Link]:
    """Every link of the built-in catalog by its name."""
    return {
        name: make_link(name, read_row(LINK_KEYS, row, where=name, file="")[0])
        for name, row in read_shipped("links.toml").items()
    }


def find_accelerator(name: str, *, where: str, catalog: "Catalog | None" = None) -> Accelerator:
    """The accelerator of that name or alias, in any case.

    Args:
        name: As a person or a data sheet writes it: `H100-SXM`, `h100`, `A100-SXM4-80GB`.
        where: Its place in the job, for the message.
        catalog: Where to look; the built-in one when left out.

    Raises:
        JobError: `T001`, naming the nearest one.
    """
    accelerators = load_accelerators() if catalog is None else catalog.accelerators
    spellings = accelerator_spellings(accelerators)
    found = {spelling.lower(): known for spelling, known in spellings.items()}.get(
        name.strip().lower()
    )
    if found is None:
        raise JobError(no_such("T001", "accelerator", name, spellings, where))
    return accelerators[found]


def find_link(name: str, *, where: str, catalog: "Catalog | None" = None) -> Link:
    """The link of that name, in any case.

    Raises:
        JobError: `T004`, naming the nearest one.
    """
    links = load_links() if catalog is None else catalog.links
    found = {known.lower(): link for known, link in links.items()}.get(name.strip().lower())
    if found is None:
        raise JobError(no_such("T004", "link", name, {each: each for each in links}, where))
    return found


def accelerator_spellings(accelerators: Mapping[str, Accelerator]) -> dict[str, str]:
    """Every spelling that is accepted -> the name it stands for; names win over aliases."""
    spellings = {alias: name for name, known in accelerators.items() for alias in known.aliases}
    return spellings | {name: name for name in accelerators}


@cache
def read_shipped(name: str) -> dict[str, Any]:
    """The rows of a TOML file of the catalog, whole: what `like` takes over is in them."""
    rows = tomllib.loads((files("paceline.catalog") / name).read_text(encoding="utf-8"))
    return with_likes(rows)


def read_folder(name: str) -> dict[str, tuple[str, Any]]:
    """Every row of the TOML files of a folder of the catalog, with the name of its file.

    Raises:
        ValueError: Two rows have one name.
    """
    found: dict[str, tuple[str, Any]] = {}
    for entry in sorted((files("paceline.catalog") / name).iterdir(), key=lambda each: each.name):
        stem, _, ending = entry.name.rpartition(".")
        rows = read_shipped(f"{name}/{entry.name}") if ending == "toml" else {}
        for row_name, row in rows.items():
            if row_name in found:
                raise ValueError(f"{row_name} is in {entry.name} and in {found[row_name][0]}.toml")
            found[row_name] = stem, row
    return found
