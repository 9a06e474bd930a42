"""What is installed for this Python, with what each package requires. Imports none of it."""

import importlib.metadata
from dataclasses import dataclass

from packaging.utils import canonicalize_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """One package."""

    version: str
    requires: tuple[str, ...] = ()
    """As its metadata has them, markers included."""


def find_installed() -> dict[str, Installed]:
    """Canonical name -> package; of two that are called alike, the one that is imported."""
    found: dict[str, Installed] = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if name and each.version:  # a broken installation has none
            found.setdefault(
                canonicalize_name(name),
                Installed(version=each.version, requires=tuple(each.requires or ())),
            )
    return found
