"""`paceline --version`: what is installed here. Nothing of it is imported."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

from paceline import __version__

_ENGINES = (
    *("accelerate", "deepspeed", "megatron-core", "megatron-bridge", "torchtitan", "transformers"),
    *("peft", "trl", "lightning", "ray", "mlx", "tensorflow"),
)
"""Packages that run a training, or that a plan is written for."""


def show_version(*, as_json: bool) -> None:
    """Print the versions of Paceline, Python, torch and every engine that is installed."""
    from paceline.topology.node.probe_torch import probe_torch_build

    torch = probe_torch_build()
    engines = {name: found for name in _ENGINES if (found := _version(name)) is not None}
    if as_json:
        build = None
        if torch is not None:
            build = {"version": torch.version, "cuda": torch.cuda, "hip": torch.hip}
        here = {"paceline": __version__, "python": platform.python_version(), "torch": build}
        click.echo(json.dumps({**here, "engines": engines}, indent=2))
        return
    click.echo(f"paceline {__version__}")
    click.echo(f"python   {platform.python_version()} ({sys.executable})")
    built = "not installed; training needs it: pip install torch"
    if torch is not None:
        rocm = f"ROCm {torch.hip}" if torch.hip else "CPU only"
        built = f"{torch.version} ({f'CUDA {torch.cuda}' if torch.cuda else rocm})"
    click.echo(f"torch    {built}")
    listed = (f"{name} {found}" for name, found in engines.items())
    click.echo(f"engines  {', '.join(listed) or 'none installed'}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
