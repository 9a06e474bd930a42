"""Reading one contract: typed values by dotted key, problems and notes gathered on the way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from paceline.errors import Problem, did_you_mean
from paceline.job.length import Length

_KINDS: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "a whole number": (int,),
    "a number": (int, float),
    "zero or more": (int, float),
    "yes or no": (bool,),
    "a section": (dict,),
    "a list": (list,),
}


MOST = 10**15
"""Above any count in a job; larger ones are slips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractText:
    """A contract as JSON values, and where it is from."""

    value: Mapping[str, Any]
    source: str
    folder: Path


@dataclass(slots=True, kw_only=True)
class Translation:
    """A job in the making."""

    contract: ContractText
    job: dict[str, Any] = field(default_factory=dict)
    """Sections of a job file."""

    length: Length | None = None
    """What the contract's epochs and bytes make of the run."""

    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def set(self, key: str, value: object) -> None:
        """Give a dotted key of the job a value."""
        section, _, name = key.rpartition(".")
        (self.job.setdefault(section, {}) if section else self.job)[name] = value

    def note(self, text: str) -> None:
        """Something assumed or not used."""
        self.notes.append(text)

    def wrong(self, key: str, what: str, fix: str, code: str = "J022") -> None:
        """A value that cannot be used."""
        self.problems.append(
            Problem(code=code, what=what, where=f"{key}, {self.contract.source}", fix=fix)
        )

    def section(self, name: str, known: Mapping[str, str], *, required: bool) -> dict[str, Any]:
        """A section's values of the right kind; what is missing, unknown or of the wrong kind is a
        problem.

        Args:
            known: Its keys, and of which of `_KINDS` each is.
        """
        value = self.contract.value.get(name)
        if value is None:
            if required:
                self.wrong(name, f"`{name}` is missing", f"add {name}: {{...}}", code="J020")
            return {}
        if not isinstance(value, dict):
            self.wrong(name, f"`{name}` is {_short(value)}", "it is a section with keys of its own")
            return {}
        found: dict[str, Any] = {}
        for key, each in value.items():
            dotted = f"{name}.{key}"
            if key not in known:
                self.unknown(dotted, key, list(known))
            elif each is not None and self._is(dotted, each, known[key]):
                found[key] = each
        return found

    def unknown(self, dotted: str, key: str, known: list[str]) -> None:
        """A key that the contract does not have."""
        fix = did_you_mean(key, known) or f"known keys are {', '.join(known)}"
        self.wrong(dotted, f"the contract has no key `{dotted}`", fix, code="J021")

    def read(self, key: str, value: Any, parse: Callable[[Any], Any], example: str) -> Any:
        """A text with its unit as a number above zero; None, and a problem, when it is none."""
        try:
            number = parse(value)
        except ValueError as error:
            self.wrong(key, f"`{key}`: {error}", f"write it like {example}")
            return None
        except OverflowError:
            number = inf
        if not 0 < number < inf:
            what = f"`{key}` is {_short(value)}, and must be above zero and finite"
            self.wrong(key, what, f"write it like {example}")
            return None
        return number

    def _is(self, key: str, value: object, kind: str) -> bool:
        wanted = _KINDS[kind]
        good = isinstance(value, wanted) and (bool in wanted or not isinstance(value, bool))
        if good and kind in ("a whole number", "a number") and not value > 0:  # type: ignore[operator]
            self.wrong(
                key, f"`{key}` is {_short(value)}, and must be above zero", "write 1 or more"
            )
            return False
        if good and isinstance(value, int | float) and not value < MOST:
            self.wrong(key, f"`{key}` is {_short(value)}, which is too large", "write less")
            return False
        if good and kind == "zero or more" and not value >= 0:  # type: ignore[operator]
            self.wrong(
                key, f"`{key}` is {_short(value)}, and must not be negative", "write 0 or more"
            )
            return False
        if not good:
            self.wrong(key, f"`{key}` is {_short(value)}, and must be {kind}", f"write {kind}")
        return good


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
