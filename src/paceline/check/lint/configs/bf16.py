"""bfloat16 on accelerators whose hardware has none."""

import re

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, found

_OLD = re.compile(r"(?i)\b([VP]100|P40|P4|K80|T4|GTX|TITAN|RTX[ -]?20\d\d|RTX ?[68]000)\b")
"""Before Ampere (compute capability below 8.0), which has bf16 in hardware first."""


def lacks_bf16(gpu: str | None) -> bool:
    """Whether this accelerator, as its owner writes it, surely has no bf16."""
    return gpu is not None and _OLD.search(gpu.replace("_", " ").replace("-", " ")) is not None


def bf16_finding(path: str, line: int, said: str, gpu: str) -> Finding:
    """bf16 asked for on a GPU before Ampere."""
    return found(
        "bf16-unsupported-gpu",
        ERROR,
        path,
        line,
        f"{said} asks for bf16, which {gpu} has not",
        fix="fp16 with loss scaling, or a GPU from Ampere on",
    )
