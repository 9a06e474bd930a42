"""A catalog: the built-in one with a file of the reader's own merged over it.

The file is TOML: `[accelerators.NAME]` and `[links.NAME]` change a known row, or add one that is
whole or `like` another; `[[prices]]` replace the shipped ones of the same provider and
accelerator; `prices_file` names a table that replaces them all; `[providers.NAME]` has a provider's
`storage` and `egress`; `[efficiencies.NAME]` is checked and kept, for `estimate/` to read.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from paceline.catalog._rows import NOT_OF, Key, laid_over, no_such, read_row, text, unknown_key
from paceline.catalog.accelerator import ACCELERATOR_KEYS, Accelerator, make_accelerator
from paceline.catalog.efficiencies import load_efficiencies
from paceline.catalog.efficiency_keys import check_efficiencies
from paceline.catalog.link import LINK_KEYS, Link
from paceline.catalog.load import (
    accelerator_named,
    accelerator_spellings,
    load_accelerators,
    load_links,
    read_shipped,
)
from paceline.catalog.price import (
    PRICE_KEYS,
    Price,
    load_prices,
    make_price,
    name_of_price,
    read_prices,
)
from paceline.catalog.provider import Rents, read_rents
from paceline.catalog.toml_lines import with_lines
from paceline.errors import JobError, Problem, did_you_mean

CATALOG_FILE = "paceline-catalog.toml"
"""Read when it lies beside the job file."""

_TABLES = ("accelerators", "links", "prices", "prices_file", "providers", "efficiencies")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything that is known beforehand about hardware."""

    accelerators: Mapping[str, Accelerator]
    links: Mapping[str, Link]
    prices: tuple[Price, ...]
    efficiencies: Mapping[str, Mapping[str, Any]]
    """`[efficiencies.NAME]` of the file by the accelerator's name; empty for the built-in
    catalog. `catalog.efficiencies.with_measured` lays them over what is shipped."""

    source: Path | None
    """The reader's file; None for the built-in catalog alone."""

    changed: frozenset[str] = frozenset()
    """`accelerators.NAME` and `links.NAME` that the file changes or adds."""


def catalog_example() -> str:
    """The commented catalog file that `paceline catalog --write` starts a reader off with."""
    return (files("paceline.catalog") / "example.toml").read_text(encoding="utf-8")


def find_catalog_file(folder: Path, named: str | None) -> Path | None:
    """The catalog file of a job: what `cluster.catalog` names, else the one beside it, if any."""
    if named is not None:
        return folder / Path(named).expanduser()
    beside = folder / CATALOG_FILE
    return beside if beside.is_file() else None


@cache
def built_in_catalog() -> Catalog:
    """What is shipped."""
    return Catalog(
        accelerators=load_accelerators(),
        links=load_links(),
        prices=load_prices(),
        efficiencies={},
        source=None,
    )


def load_catalog(path: Path | None) -> Catalog:
    """The built-in catalog, with the reader's file merged over it.

    Args:
        path: The file; None for the built-in catalog alone.

    Raises:
        JobError: Every mistake of the file at once, `T010` to `T013`, `T015`, `T001` and
            `T004`.
    """
    if path is None:
        return built_in_catalog()
    words, tables = _read(path)
    try:
        return merge_catalog(tables, path)
    except JobError as error:
        raise JobError(*with_lines(error.problems, words, path.name)) from None


def merge_catalog(tables: Mapping[str, Any], path: Path) -> Catalog:
    """A catalog merged from the tables of a file; `path` names it in messages."""
    file = path.name
    problems = [
        unknown_key(name, _TABLES, where="the file", file=file)
        for name in tables
        if name not in _TABLES
    ]
    shipped = built_in_catalog()
    links = _Merge("links", LINK_KEYS, {each: each for each in shipped.links}, file, problems)
    new_links = links.rows(
        tables, read_shipped("links.toml"), lambda name, values: Link(name=name, **values)
    )
    spellings = accelerator_spellings(shipped.accelerators)
    merge = _Merge("accelerators", ACCELERATOR_KEYS, spellings, file, problems)
    new = merge.rows(tables, read_shipped("accelerators.toml"), make_accelerator)
    all_links = {**shipped.links, **new_links}
    for name, accelerator in new.items():
        problems += _missing_links(name, accelerator, all_links, file)
    accelerators = {**shipped.accelerators, **new}
    prices = _prices(tables, accelerators, file, problems)
    listed = _listed(tables, accelerators, path, problems)
    replaced = {(price.provider, price.accelerator) for price in prices}
    prices += [each for each in listed if (each.provider, each.accelerator) not in replaced]
    prices = _with_rents(tables, prices, file, problems)
    efficiencies = _tables_of(tables, "efficiencies", file, problems)
    problems += check_efficiencies(efficiencies, accelerators, file=file)
    if problems:
        raise JobError(*problems)
    return Catalog(
        accelerators=accelerators,
        links=all_links,
        prices=tuple(prices),
        efficiencies=_with_families(_by_name(efficiencies, accelerators), merge.likes),
        source=path,
        changed=frozenset(
            {f"links.{name}" for name in new_links} | {f"accelerators.{name}" for name in new}
        ),
    )


class _Merge:
    """One table of the file over the shipped rows; collects what is wrong."""

    def __init__(
        self,
        table: str,
        keys: Mapping[str, Key],
        spellings: Mapping[str, str],
        file: str,
        problems: list[Problem],
    ) -> None:
        self._table = table
        self._keys = keys
        self._spellings = spellings
        self._file = file
        self._problems = problems
        self.likes: dict[str, str] = {}
        """Name of a row -> the row that it is like."""

    def rows(
        self,
        tables: Mapping[str, Any],
        shipped: Mapping[str, Mapping[str, Any]],
        make: Callable[[str, Mapping[str, Any]], _T],
    ) -> dict[str, _T]:
        """Name -> what its row says, for the rows that the file has."""
        known = {spelling.lower(): name for spelling, name in self._spellings.items()}
        raw: dict[str, Mapping[str, Any]] = dict(shipped)
        made: dict[str, _T] = {}
        for spelled, row in _tables_of(tables, self._table, self._file, self._problems).items():
            where = f"{self._table}.{spelled}"
            name = known.get(spelled.lower(), spelled)
            base = self._base(name, row, raw, known, where)
            if base is None:
                continue
            whole = laid_over(base, row) if "like" in row else {**base, **row}
            if base and "sources" in self._keys and isinstance(row.get("sources", {}), Mapping):
                whole["sources"] = {**base.get("sources", {}), **_changed(row, self._file)}
            values, problems = read_row(
                self._keys,
                whole,
                where=where,
                file=self._file,
                optional=NOT_OF.get(name, ()),
            )
            self._problems += problems
            raw[name] = whole
            known.setdefault(name.lower(), name)
            if not problems:
                made[name] = make(name, values)
        return made

    def _base(
        self,
        name: str,
        row: Mapping[str, Any],
        raw: Mapping[str, Mapping[str, Any]],
        known: Mapping[str, str],
        where: str,
    ) -> Mapping[str, Any] | None:
        """The row that the file's is laid over; empty for a new one, None when there is none."""
        if "like" not in row:
            return raw.get(name, {})
        like = row["like"]
        found = known.get(like.strip().lower()) if isinstance(like, str) else None
        if found is not None:
            self.likes[name] = found
            return raw[found]
        code = "T001" if self._table == "accelerators" else "T004"
        spellings = {**self._spellings, **{each: each for each in raw}}
        kind = self._table.removesuffix("s")
        place = f"{where}.like in {self._file}"
        self._problems.append(no_such(code, kind, str(like), spellings, place))
        return None


def _changed(own: Mapping[str, Any], file: str) -> dict[str, str]:
    """Sources of a changed row: those it gives, and which keys came from the file."""
    keys = ", ".join(key for key in own if key not in ("like", "source", "sources"))
    return {**own.get("sources", {}), **({file: keys} if keys else {})}


def _tables_of(
    tables: Mapping[str, Any], table: str, file: str, problems: list[Problem]
) -> dict[str, Mapping[str, Any]]:
    """Name -> row of one table; anything else in its place is a problem."""
    rows = tables.get(table, {})
    wrong = [] if isinstance(rows, Mapping) else [table]
    found: dict[str, Mapping[str, Any]] = {}
    for name, row in rows.items() if isinstance(rows, Mapping) else ():
        if isinstance(row, Mapping):
            found[name] = row
        else:
            wrong.append(f"{table}.{name}")
    problems += [
        Problem(
            code="T013",
            what=f"`{place}` is not a table",
            where=f"{place} in {file}",
            fix=f"write [{table}.NAME] on a line of its own, and its keys below it",
        )
        for place in wrong
    ]
    return found


def _by_name(
    rows: Mapping[str, Mapping[str, Any]], accelerators: Mapping[str, Accelerator]
) -> dict[str, Mapping[str, Any]]:
    """The rows under the catalog's names: `[efficiencies.h100]` is of H100-SXM."""
    found = ((accelerator_named(name, accelerators), row) for name, row in rows.items())
    return {known.name: row for known, row in found if known is not None}


def _with_families(
    rows: Mapping[str, Mapping[str, Any]], likes: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """An accelerator like another reaches what that one's family reaches."""
    shipped, found = load_efficiencies(), dict(rows)
    families: dict[str, str] = {}
    for name, like in likes.items():
        families[name] = families.get(like, shipped.family_of(like))
        found[name] = {"family": families[name], **found.get(name, {})}
    return found


def _missing_links(
    name: str, accelerator: Accelerator, links: Mapping[str, Link], file: str
) -> list[Problem]:
    asked = {
        "link": accelerator.link,
        "host_link": accelerator.host_link,
        "network": accelerator.network,
    }
    names = {each: each for each in links}
    return [
        no_such("T004", "link", link, names, f"accelerators.{name}.{key} in {file}")
        for key, link in asked.items()
        if link is not None and link not in links
    ]


def _prices(
    tables: Mapping[str, Any],
    accelerators: Mapping[str, Accelerator],
    file: str,
    problems: list[Problem],
) -> list[Price]:
    rows = tables.get("prices", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        problems.append(
            Problem(
                code="T013",
                what="`prices` is not a list of tables",
                where=f"prices in {file}",
                fix="write [[prices]], with two brackets, before each price",
            )
        )
        return []
    found: list[Price] = []
    for index, row in enumerate(rows, start=1):
        where = f"prices {index}"
        values, wrong = read_row(PRICE_KEYS, row, where=where, file=file)
        place = f"{where}.accelerator in {file}"
        name, unknown = name_of_price(values.get("accelerator"), accelerators, place)
        problems += wrong + unknown
        if not wrong + unknown:
            found.append(replace(make_price(values, file=file), accelerator=name))
    return found


def _with_rents(
    tables: Mapping[str, Any], prices: list[Price], file: str, problems: list[Problem]
) -> list[Price]:
    """The prices with what the file says of their providers' storage and traffic out."""
    known = {price.provider.lower(): price.provider for price in prices}
    own: dict[str, Rents] = {}
    for name, row in _tables_of(tables, "providers", file, problems).items():
        where = f"providers.{name}"
        rents, wrong = read_rents(row, where=where, file=file)
        problems += wrong
        if name.lower() in known:
            own[known[name.lower()]] = rents
        elif not any(each.where.startswith("prices") for each in problems):
            problems.append(
                Problem(
                    code="T013",
                    what=f"no machine of `{name}` has a price",
                    where=f"{where} in {file}",
                    fix=did_you_mean(name, list(known.values()), cutoff=0.4)
                    or f'add one: [[prices]] with provider = "{name}"',
                )
            )
    return [replace(each, rents=own.get(each.provider, each.rents)) for each in prices]


def _listed(
    tables: Mapping[str, Any],
    accelerators: Mapping[str, Accelerator],
    path: Path,
    problems: list[Problem],
) -> tuple[Price, ...]:
    """The prices of `prices_file`; the shipped ones where the file names none."""
    named = tables.get("prices_file")
    if named is None:
        return load_prices()
    try:
        table = path.parent / Path(text(named)).expanduser()
        return read_prices(table.read_text("utf-8"), file=table.name, accelerators=accelerators)
    except JobError as error:
        problems += error.problems
        return ()
    except (OSError, ValueError) as error:
        problems.append(
            Problem(
                code="T013",
                what=f"prices_file {named!r} cannot be read: {error}",
                where=f"prices_file in {path.name}",
                fix="name a table with the columns of the catalog's own: "
                "scripts/refresh_prices.py --help says how to write one",
            )
        )
        return ()


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """A file's text, and its tables."""
    try:
        words = path.read_text(encoding="utf-8")
        return words, tomllib.loads(words)
    except FileNotFoundError:
        what, fix = f"there is no file {path}", "write one: paceline catalog --write FILE"
    except tomllib.TOMLDecodeError as error:
        what, fix = f"{path} is not TOML: {error}", "correct it there; text stands in quotes"
    except UnicodeDecodeError:
        what, fix = f"{path} is not UTF-8 text", "save it as UTF-8"
    except OSError as error:
        what, fix = f"{path} cannot be read: {text(error.strerror)}", "give a readable TOML file"
    raise JobError.of(code="T010", what=what, where=str(path), fix=fix)
