"""Which names of accelerators mean something to the rules."""

from paceline.catalog import accelerator_spellings, load_accelerators
from paceline.catalog.generation import generation_of


def knows_gpu(name: str) -> bool:
    """Whether a name is of the catalogue, or of a generation that is known.

    >>> knows_gpu("A100-SXM4-80GB"), knows_gpu("nonsense")
    (True, False)
    """
    spelled = {one.lower() for one in known_gpus()}
    return name.strip().lower() in spelled or generation_of(name) is not None


def known_gpus() -> tuple[str, ...]:
    """Every spelling of the catalogue, for a message that names the nearest ones."""
    return tuple(accelerator_spellings(load_accelerators()))
