"""Container images and wheels: the CUDA they were built with, against the GPU they run on."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, found

_CUDA = re.compile(r"(?:cuda-?|/cu|[-+]cu)(\d{2})\.?(\d)")
"""`cuda12.4`, `cuda-11.8`, `whl/cu118`, `+cu121`."""

_NEEDS: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"\b(GB|B)[23]00\b|RTX[ -]?(50\d\d|PRO)|\b5090\b", (12, 8)),
    (r"\bH(100|200|20)\b|GH200|L40|\bL4\b|RTX[ -]?40\d\d|\b4090\b", (11, 8)),
    (r"\bA100\b", (11, 0)),
)
"""First CUDA with kernels for a GPU: its architecture's row in the CUDA toolkit's release notes."""

_VOLTA = re.compile(r"(?i)\b[VP]100\b")
"""Dropped in CUDA 13 (its release notes, "Deprecated architectures")."""


def check_image(path: str, line: int, name: str, gpu: str | None) -> Iterator[Finding]:
    """An image or wheel index whose CUDA has no kernels for this GPU."""
    cuda = _CUDA.search(name)
    if cuda is None or gpu is None:
        return
    version = (int(cuda[1]), int(cuda[2]))
    least = next((need for kind, need in _NEEDS if re.search(kind, gpu, re.I)), None)
    too_new = version >= (13, 0) and _VOLTA.search(gpu) is not None
    if (least is None or version >= least) and not too_new:
        return
    yield found(
        "no-kernel-image",
        ERROR,
        path,
        line,
        f"{name} was built with CUDA {version[0]}.{version[1]}, which has no kernels for {gpu}",
        fix="a build with CUDA 12"
        if too_new and least is None
        else f"a build with CUDA {least[0]}.{least[1]} or newer"
        if least
        else "an older build",
    )
