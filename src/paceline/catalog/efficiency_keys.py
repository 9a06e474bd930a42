"""What may stand in `[efficiencies.NAME]` of a catalog file, and every mistake there."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.catalog._rows import no_such, unknown_key
from paceline.catalog.accelerator import PRECISIONS, Accelerator
from paceline.catalog.efficiencies import (
    AS_OTHER,
    MEASURED_LINKS,
    MatmulEfficiency,
    load_efficiencies,
)
from paceline.catalog.load import accelerator_named, accelerator_spellings
from paceline.errors import Problem


def check_efficiencies(
    rows: Mapping[str, Mapping[str, Any]], accelerators: Mapping[str, Accelerator], *, file: str
) -> Iterator[Problem]:
    """Unknown accelerators, unknown keys and values that are no numbers.

    Args:
        rows: Tables `[efficiencies.NAME]` by name.
        accelerators: Those that a table may be of, and their slices.
        file: For messages.
    """
    shipped = load_efficiencies()
    names = (*shipped.attention, *shipped.step, *MEASURED_LINKS)
    numbers = ["sustained", "attention_half_len", *names]
    for name, row in rows.items():
        where = f"efficiencies.{name}"
        if accelerator_named(name, accelerators) is None:
            spellings = accelerator_spellings(accelerators)
            yield no_such("T001", "accelerator", name, spellings, f"{where} in {file}")
        for key, value in row.items():
            if key == "source":
                continue
            if key == "matmul":
                yield from _check_matmul(value, where=f"{where}.matmul", file=file)
            elif key in numbers:
                yield from _check_number(value, where=f"{where}.{key}", file=file)
            else:
                yield _unknown(key, ["matmul", "source", *numbers], where=where, file=file)


def _check_matmul(tables: Any, *, where: str, file: str) -> Iterator[Problem]:
    precisions = [kind for kind in (*PRECISIONS, "nvfp4") if kind not in AS_OTHER]
    if not isinstance(tables, Mapping):
        fix = f"write [{where}.bf16] on a line of its own, and share = ... below it"
        yield _wrong(f"`matmul` is {tables!r}, not a table", where, fix, file)
        return
    for kind, row in tables.items():
        inner = f"{where}.{kind}"
        if kind in AS_OTHER:
            fix = f"write matmul.{AS_OTHER[kind]}"
            what = f"`{kind}` is planned for with the constants of {AS_OTHER[kind]}"
            yield _wrong(what, inner, fix, file)
        elif kind not in precisions:
            yield _unknown(kind, precisions, where=where, file=file)
        elif not isinstance(row, Mapping):
            yield _wrong(f"`{kind}` is {row!r}, not a table", inner, f"write [{inner}]", file)
        else:
            for key, value in row.items():
                if key not in MatmulEfficiency.__slots__:
                    yield _unknown(key, list(MatmulEfficiency.__slots__), where=inner, file=file)
                else:
                    yield from _check_number(value, where=f"{inner}.{key}", file=file)


def _check_number(value: Any, *, where: str, file: str) -> Iterator[Problem]:
    """Shares may be above 1: a CPU's peak is an estimate. Times are divided by those of a rate."""
    key = where.rpartition(".")[2]
    divides = key.endswith("share") or key == "sustained" or key in load_efficiencies().attention
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e9 or (divides and value == 0):
        fix = "write a number above 0" if divides else "write a number that is not negative"
        yield _wrong(f"`{key}` is {value!r}", where, fix, file)


def _unknown(name: str, known: list[str], *, where: str, file: str) -> Problem:
    problem = unknown_key(name, known, where=where, file=file)
    return Problem(code="T015", what=problem.what, where=problem.where, fix=problem.fix)


def _wrong(what: str, where: str, fix: str, file: str) -> Problem:
    return Problem(code="T015", what=what, where=f"{where} in {file}", fix=fix)
