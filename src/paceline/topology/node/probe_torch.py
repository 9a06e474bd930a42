"""The installed PyTorch, read from its files: importing it takes seconds, and fails where NCCL's
library is missing."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from paceline.topology.node.facts import TorchBuild


def probe_torch_build() -> TorchBuild | None:
    """What this Python's PyTorch was built for; None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        requirements = importlib.metadata.requires("torch") or []
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    wanted = wanted_nccl(requirements)
    return TorchBuild(
        version=_value(text, "__version__") or "",
        cuda=_value(text, "cuda"),
        hip=_value(text, "hip"),
        nccl_wanted=wanted,
        nccl=_installed(wanted) if wanted is not None else None,
    )


def wanted_nccl(requirements: list[str]) -> str | None:
    """The NCCL package among a wheel's requirements, as `name==version`.

    >>> wanted_nccl(["filelock", "nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'"])
    'nvidia-nccl-cu13==2.29.7'
    """
    for requirement in requirements:
        found = re.match(r"(nvidia-nccl-cu\d+)\s*\(?==\s*([\w.]+)", requirement)
        if found:
            return f"{found[1]}=={found[2]}"
    return None


def _value(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE)
    return found[1] if found else None


def _installed(wanted: str) -> str | None:
    try:
        return importlib.metadata.version(wanted.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
