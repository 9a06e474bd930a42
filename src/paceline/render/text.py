"""What every rendered file says: where it comes from, and data as YAML or JSON."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from paceline import __version__
from paceline.job import Job
from paceline.job.engine import written_for
from paceline.plan import Plan
from paceline.units import counted


def header(plan: Plan, job: Job, *more: str) -> list[str]:
    """What made a file, from which plan, and how its batch comes about.

    Args:
        plan: Its layout and cluster are named.
        job: Its name is.
        more: Further lines.
    """
    layout = plan.layout
    made = f"Made by Paceline {__version__} for the job {job.spec.name}"
    steps = counted(layout.accumulation, "accumulation step")
    batch = f"micro-batch {layout.micro_batch} x {steps} x {counted(layout.data, 'data rank')}"
    return [
        f"{made}: rendering again overwrites it.",
        f"{plan.layout_name} on {plan.cluster.name}.",
        f"{batch} = {counted(layout.global_batch, 'sample')} a step.",
        *more,
    ]


def releases(plan: Plan, engine: str) -> list[str]:
    """Which releases of an engine the files are for, and which one the plan is for."""
    own = f"; planned for {plan.engine_version}" if plan.engine == engine else ""
    return [f"For {written_for(engine)}{own}."]


def commented(lines: list[str]) -> str:
    """The lines as a comment of YAML, TOML, Python or shell."""
    return "".join(f"# {line}\n" if line else "#\n" for line in lines)


def to_yaml(comment: list[str], *documents: Mapping[str, Any]) -> str:
    """One or more YAML documents under a comment."""
    texts = [
        yaml.dump(dict(each), Dumper=_Dumper, sort_keys=False, width=100) for each in documents
    ]
    return commented(comment) + "---\n".join(texts)


def to_json(value: Any) -> str:
    """JSON, which has no comments: a reason goes into a file beside it."""
    return json.dumps(value, indent=2) + "\n"


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Text of several lines as a block that people can read; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
