"""Environment variables of NCCL, torch's NCCL group and MLX: values that do harm, and values that
are not taken as they were meant. `software.toml` has them; lint, preflight, doctor, diagnose and
the rendered scripts read them here.

Source: NCCL's user guide, env.html (2.30), and its sources: `ncclLoadParam` in src/misc/param.cc,
`ncclGetLevel` in src/graph/paths.cc, `parseStringList` in src/misc/utils.cc, NCCL_IB_HCA in
src/transport/net_ib/init.cc, src/debug.cc; PyTorch's ProcessGroupNCCL environment variables (2.13).
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.catalog._rows import make_row, with_likes
from paceline.catalog.load import read_shipped

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """A variable that is better left unset."""

    name: str
    reason: str
    """What it does: one line."""

    values: str
    """Pattern of the values that do harm."""

    failure: str = "debugging-left-on"
    """Id of what it becomes."""

    level: Level = "info"

    def harms(self, value: str) -> bool:
        """Whether the variable does harm with this value."""
        return re.fullmatch(self.values, value.strip(), re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The words that a variable takes."""

    name: str
    words: tuple[str, ...]
    otherwise: str
    """What happens with another word."""

    level: Level
    any_case: bool = True
    has_own: bool = False
    """Other words are meant by people (`NCCL_DEBUG=OFF`): only those near to a known one count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongValue:
    """A value that is not taken as it was meant."""

    what: str
    fix: str
    level: Level
    failure: str = "nccl-env-deprecated"
    """Id of what it becomes."""


_ENVIRONMENT = read_shipped("software.toml")["environment"]


def unwanted(table: str) -> Mapping[str, Unwanted]:
    """The rows of one table of `software.toml`: `removed_nccl`, `unwanted_nccl` ..."""
    return {
        name: make_row(Unwanted, row, where=name, file="software.toml", name=name)
        for name, row in with_likes(_ENVIRONMENT[table]).items()
    }


UNWANTED: Mapping[str, Unwanted] = {
    name: row
    for table in ("removed_nccl", "removed_rdma", "removed_mlx", "unwanted_nccl")
    for name, row in unwanted(table).items()
}

_WORDS: Mapping[str, Words] = {
    name: make_row(Words, row, where=name, file="software.toml", name=name)
    for name, row in with_likes(_ENVIRONMENT["values"]).items()
}

_NUMBERS = frozenset(_ENVIRONMENT["nccl_numbers"].split())

_UNKNOWN_YET = re.compile(r"[${<%]")
"""A value that holds another variable, or a place for one."""


def wrong_value(
    name: str, value: str, *, devices: Sequence[str] | None = None
) -> WrongValue | None:
    """What NCCL makes of a value, where it is not what was meant; None where nothing is wrong.

    Args:
        devices: Names of the RDMA devices there are, for `NCCL_IB_HCA`; None: not known.

    >>> wrong_value("NCCL_BUFFSIZE", "8M").what
    'NCCL_BUFFSIZE=8M: NCCL reads a whole number and takes 8'
    """
    value = value.strip()
    if not value or _UNKNOWN_YET.search(value):
        return None
    if name == "NCCL_IB_HCA":
        return _wrong_devices(value, devices)
    if name == "NCCL_DEBUG" and value.lower() == "trace":
        what = "NCCL_DEBUG=TRACE prints what INFO prints: torch's NCCL is built without traces"
        return WrongValue(what=what, fix="NCCL_DEBUG=INFO", level="info")
    if name == "NCCL_NET_GDR_LEVEL" and value in ("0", "LOC"):
        what, fix = f"{name}={value} switches GPUDirect RDMA off", f"remove {name}"
        return WrongValue(what=what, fix=fix, level="warning", failure="gdr-peermem-missing")
    if name in _NUMBERS:
        return _wrong_number(name, value)
    return _wrong_word(_WORDS[name], value) if name in _WORDS else None


def _wrong_word(row: Words, value: str) -> WrongValue | None:
    for part in re.split("[,;:]", value):
        word = part.strip().lstrip("^")
        known = {each.lower(): each for each in row.words}
        near = difflib.get_close_matches(word.lower(), known, n=1)
        is_known = word.lower() in known if row.any_case else word in row.words
        if not word or is_known or word.isdigit() or (row.has_own and not near):
            continue
        what = f"{row.name} has no value `{part.strip()}`: {row.otherwise}"
        fix = f"write {known[near[0]]}" if near else f"remove {row.name}"
        return WrongValue(what=what, fix=fix, level=row.level)
    return None


_SUFFIX = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_YES = frozenset({"true", "yes", "on", "y", "t", "enable", "enabled"})
_NO = frozenset({"false", "no", "off", "n", "f", "disable", "disabled", "none"})


def _wrong_number(name: str, value: str) -> WrongValue | None:
    """`strtoll` reads the digits that a value begins with, and 0 where it begins with none."""
    if re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)", value) or value.lower() in _NO:
        return None
    taken = re.match(r"[+-]?\d+", value)
    what = f"{name}={value}: NCCL reads a whole number and takes {taken[0] if taken else 0}"
    size = re.fullmatch(r"(\d+)\s*([kmg])(i?b)?", value, re.IGNORECASE)
    if size:
        fix = f"{name}={int(size[1]) * _SUFFIX[size[2].lower()]}"
    elif value.lower() in _YES:
        fix = f"{name}=1"
    else:
        fix = f"write a whole number, or remove {name}"
    return WrongValue(what=what, fix=fix, level="warning")


def _wrong_devices(value: str, devices: Sequence[str] | None) -> WrongValue | None:
    """`^` excludes, `=` after it asks for whole names: both once, before the list. Without `=` each
    word is the beginning of a name, and `mlx5_1` takes `mlx5_10` as well."""
    form = re.fullmatch(r"(\^?=?)([^=^\s]*)", value)
    if form is None:
        bare = ",".join(re.findall(r"[^=^,\s]+", value))
        signs = ("^" if "^" in value else "") + ("=" if "=" in value else "")
        what = (
            f"NCCL_IB_HCA={value}: ^ and = stand once, in this order, before a list without blanks"
        )
        return WrongValue(what=what, fix=f'NCCL_IB_HCA="{signs}{bare}"', level="warning")
    signs, listed = form[1], form[2]
    if "=" in signs:
        return None
    words = [word.partition(":")[0] for word in listed.split(",") if word]
    short = [word for word in words if re.search(r"_[1-9]\d*$", word)]
    longer = [
        device
        for device in devices or ()
        if any(re.fullmatch(re.escape(word) + r"\d+", device) for word in short)
        and device not in words
    ]
    if not short or (devices is not None and not longer):
        return None
    also = (
        f"{', '.join(longer)} too"
        if longer
        else f"{short[0]}0 to {short[0]}9 too, where they exist"
    )
    what = f"NCCL_IB_HCA={value} {'leaves out' if signs else 'takes'} {also}: names without = "
    what += "are the beginnings of names"
    level: Level = "warning" if longer else "info"
    return WrongValue(what=what, fix=f'NCCL_IB_HCA="{signs}={listed}"', level=level)
