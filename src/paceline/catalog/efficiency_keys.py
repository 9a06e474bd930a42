"""What may stand in `[efficiencies.NAME]` of a catalog file, and every mistake there."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline.catalog import _rows as r
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
    """
    shipped = load_efficiencies()
    names = (*shipped.attention, *shipped.step, *MEASURED_LINKS)
    keys = {
        "matmul": r.Key(read=_table),
        "source": r.Key(read=str),
        **{name: _number(name) for name in ("sustained", "attention_half_len", *names)},
    }
    for name, row in rows.items():
        where = f"efficiencies.{name}"
        if accelerator_named(name, accelerators) is None:
            spellings = accelerator_spellings(accelerators)
            yield r.no_such("T001", "accelerator", name, spellings, f"{where} in {file}")
        values, problems = r.read_row(keys, row, where=where, file=file)
        tables, wrong = r.read_row(
            _PRODUCTS, values.get("matmul", {}), where=f"{where}.matmul", file=file
        )
        problems += wrong
        for kind, table in tables.items():
            problems += r.read_row(_PRODUCT, table, where=f"{where}.matmul.{kind}", file=file)[1]
        yield from (replace(each, code="T015") for each in problems)


def _number(name: str) -> r.Key:
    """Shares may be above 1: a CPU's peak is an estimate. Times are divided by those of a rate."""
    divides = name.endswith("share") or name == "sustained" or name in load_efficiencies().attention
    return r.Key(read=r.number if divides else r.amount)


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("a table: share = ... below [efficiencies.NAME.matmul.bf16]")
    return value


def _as_other(kind: str) -> r.Key:
    def refuse(_: object) -> object:
        raise ValueError(f"matmul.{AS_OTHER[kind]}, whose constants {kind} is planned with")

    return r.Key(read=refuse)


_PRODUCTS = {
    kind: _as_other(kind) if kind in AS_OTHER else r.Key(read=_table)
    for kind in (*PRECISIONS, "nvfp4", *AS_OTHER)
}
_PRODUCT = {
    name: replace(key, required=False)
    for name, key in r.keys_of(MatmulEfficiency, without=()).items()
}
