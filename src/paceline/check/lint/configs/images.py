"""Container images and wheels: the CUDA they were built with, against the GPU they run on."""

import re
from collections.abc import Iterator

from paceline.catalog.generation import generation_of
from paceline.check.finding import Finding
from paceline.check.lint.configs.say import ERROR, found

_CUDA = re.compile(r"(?:cuda-?|/cu|[-+]cu)(\d{2})\.?(\d)")
"""`cuda12.4`, `cuda-11.8`, `whl/cu118`, `+cu121`."""


def check_image(path: str, line: int, name: str, gpu: str | None) -> Iterator[Finding]:
    """An image or wheel index whose CUDA has no kernels for this GPU."""
    cuda = _CUDA.search(name)
    if cuda is None or gpu is None:
        return
    version = (int(cuda[1]), int(cuda[2]))
    generation = generation_of(gpu)
    if generation is None:
        return
    least, dropped = generation.first_cuda, generation.dropped_in_cuda
    if least is not None and version < least:
        fix = f"a build with CUDA {least[0]}.{least[1]} or newer"
    elif dropped is not None and version >= dropped:
        fix = f"a build with CUDA {dropped[0] - 1}"
    else:
        return
    yield found(
        "no-kernel-image",
        ERROR,
        path,
        line,
        f"{name} was built with CUDA {version[0]}.{version[1]}, which has no kernels for {gpu}",
        fix=fix,
    )
