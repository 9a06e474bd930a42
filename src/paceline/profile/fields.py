"""Sizes from the fields of a Hugging Face config.json, with every mistake collected."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import JobError, Problem

MOST_LAYERS = 10_000
_MOST = 10**9
"""Above any published size; larger ones are slips of the pen."""


class Fields:
    """The fields of one config.json. Reads go on after a mistake, so that all are shown at once."""

    def __init__(self, values: Mapping[str, Any], *, source: str, where: str) -> None:
        self.values = values
        self.source = source
        self.where = where
        self.problems: list[Problem] = []

    def size(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number above 0 by the first of its names that is there; 1 after a mistake."""
        value = self.optional(*names, most=most)
        if value is None and default is None:
            self.refuse(
                f"{self.source} has no {' or '.join(names)}",
                f"write {names[0]} as a whole number above 0",
            )
        return value or default or 1

    def optional(self, *names: str, least: int = 1, most: int = _MOST) -> int | None:
        """A field, None where it is left out or null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if is_whole and least <= value <= most:
                return int(value)
            self.refuse(
                f"{self.source} says {name} is {value!r}",
                f"write {name} as a whole number above {least - 1}"
                + (f", {most:,} at most" if is_whole and value > most else ""),
            )
            return least or None
        return None

    def whole(self, *names: str, default: int) -> int:
        """A whole number of 0 or more."""
        value = self.optional(*names, least=0)
        return default if value is None else value

    def flag(self, name: str, *, default: bool) -> bool:
        """Yes or no."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{self.source} says {name} is {value!r}", f"write {name} as true or false")
            return default
        return value

    def text(self, name: str, *, default: str) -> str:
        """A word."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            self.refuse(f"{self.source} says {name} is {value!r}", f"write {name} as text")
            return default
        return value

    def number(self, name: str, default: float) -> float:
        """A number of 0 or more, which null is."""
        value = self.values.get(name, default)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self.refuse(f"{self.source} says {name} is {value!r}", f"write {name} as a number")
            return default
        return float(value)

    def listed(self, name: str) -> list[Any] | None:
        """A list; None where it is left out."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list | tuple):
            self.refuse(f"{self.source} says {name} is {value!r}", f"write {name} as a list")
            return None
        return None if value is None else list(value)

    def head_width(self, hidden: int, heads: int, heads_name: str, hidden_name: str) -> int:
        """Width of a head that is not given: the heads must divide the hidden width."""
        if hidden % heads and not self.problems:
            near = nearest(heads, divisors(hidden))
            self.problems.append(
                Problem(
                    code="M005",
                    what=f"{heads_name} {heads} does not divide {hidden_name} {hidden}: a head "
                    f"would be {hidden / heads:.2f} wide",
                    where=self.where,
                    fix=f"set {heads_name} to {near}",
                )
            )
        return max(1, hidden // heads)

    def grouped(self, heads: int, kv_heads: int, heads_name: str, kv_name: str) -> None:
        """Every key and value head serves the same number of heads."""
        if heads % kv_heads and not self.problems:
            self.problems.append(
                Problem(
                    code="M006",
                    what=f"{kv_name} {kv_heads} does not divide {heads_name} {heads}: every key "
                    "and value head serves the same number of heads",
                    where=self.where,
                    fix=f"set {kv_name} to {nearest(kv_heads, divisors(heads))}",
                )
            )

    def at_most(self, name: str, value: int, limit_name: str, limit: int) -> None:
        """One size that cannot be above another."""
        if value > limit:
            self.refuse(
                f"{self.source} says {name} is {value}, above {limit_name} {limit}",
                f"set {name} to {limit} at most",
            )

    def check(self) -> None:
        """Raise what was found.

        Raises:
            JobError: A field is missing (`M004`), or sizes do not go together.
        """
        if self.problems:
            raise JobError(*dict.fromkeys(self.problems))

    def refuse(self, what: str, fix: str) -> None:
        """Note a field that cannot be used, and go on."""
        self.problems.append(Problem(code="M004", what=what, where=self.where, fix=fix))


def nearest(value: int, allowed: list[int]) -> str:
    """The two allowed numbers nearest to a value: `2 or 4`."""
    near = sorted(sorted(allowed, key=lambda each: abs(each - value))[:2])
    return " or ".join(str(each) for each in near)


def divisors(number: int) -> list[int]:
    """Every divisor, smallest first."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
