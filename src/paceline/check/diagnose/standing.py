"""What yields to what: which failures are causes, which follow from others.

The catalog's effect says most of it (`secondary` never wins over a cause). Beside it stands here
what is a cause of its own and yet often follows from a nearer one. Sources: the catalog's
`not_to_confuse`, and the threads in tests/check/logs.
"""

from collections.abc import Mapping

from paceline.catalog.failure import Effect, Failure
from paceline.catalog.load import read_shipped

_ROWS = read_shipped("standing.toml")
SYMPTOMS = frozenset(_ROWS["symptoms"]["names"].split())
"""Causes where nothing nearer is seen. An exception of the program is nearer."""

YIELDS: Mapping[str, frozenset[str]] = {
    name: frozenset(nearer.split()) for name, nearer in _ROWS["yields"].items()
}
"""Failure -> those that are nearer to the cause when both are seen, whichever came first."""

GENERAL = frozenset({"nccl-system-error"})
"""Says that something failed and not what: yields to everything that says more."""

MINOR = frozenset(
    {
        "nccl-env-deprecated",
        "tokenizers-fork",
        "omp-threads-default",
        "ddp-find-unused-overhead",
        "dataloader-starved",
        "rccl-iommu-pt",
        "streaming-shards-not-factor",
        "acs-p2p-hang",
    }
)
"""Said as a note; a cause only where nothing else is seen."""


def level_of(failure: Failure) -> float:
    """0 is a cause, and each further level yields to those before it."""
    if failure.effect is Effect.SECONDARY:
        return 5
    if failure.id in MINOR or failure.effect is Effect.INFO:
        return 4
    if failure.effect in {Effect.SILENT, Effect.DEGRADED, Effect.WARNING}:
        return 3
    if failure.effect is Effect.FALLBACK:
        return 1
    if failure.id in GENERAL:
        return 2.5
    return 2 if failure.id in SYMPTOMS else 0
