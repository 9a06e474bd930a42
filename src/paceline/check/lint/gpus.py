"""Which names of accelerators mean something to the rules."""

import re

from paceline.catalog import accelerator_spellings, load_accelerators

_SERIES = re.compile(
    r"(?i)\b([VPAHB][1-9]00[A-Z]?|GH200|GB[23]00|H20|T4|K80|P40|P4|L40S?|L4|L20|A[1-9]0[A-Z]?|A2|"
    r"RTX ?[A-Z]*\d{3,4}\w*|GTX ?\d+\w*|TITAN( \w+)*|MI\d{2,3}[A-Z]?|TPU.*|V[2-6][EP]?|GAUDI ?\d?|"
    r"TRN\d|TRAINIUM ?\d?|INF\d|M[1-9]( (PRO|MAX|ULTRA))?|JETSON.*|CPU|MPS)\b"
)
"""Names of series, also of devices that the catalogue has no figures of: the rules ask for
generations alone."""


def knows_gpu(name: str) -> bool:
    """Whether a name is of the catalogue, or of a series that is known.

    >>> knows_gpu("A100-SXM4-80GB"), knows_gpu("nonsense")
    (True, False)
    """
    spelled = {one.lower() for one in known_gpus()}
    plain = re.sub(r"[-_]+", " ", name).strip()
    return name.strip().lower() in spelled or _SERIES.search(plain) is not None


def known_gpus() -> tuple[str, ...]:
    """Every spelling of the catalogue, for a message that names the nearest ones."""
    return tuple(accelerator_spellings(load_accelerators()))
