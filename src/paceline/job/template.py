"""The job file that `paceline init` writes: every section, its defaults, and what they mean."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import yaml

from paceline.job.job import JobSpec
from paceline.job.section import section_in

_STARTED: dict[str, Any] = {
    "name": "my-job",
    "model": {"decoder": {"layers": 4, "hidden": 128, "heads": 4}},
    "data": {"path": "corpus/**/*.txt", "seq_len": 128},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 16, "steps": 500, "learning_rate": 1e-3, "warmup_steps": 25},
}
"""What is set in the file; every other field stands there as a comment with its default."""

_HEADER = """\
# A Paceline job. Lines that start with `# ` and a key show the default: remove the `# ` to set it.
#
#   paceline plan FILE    which layout, will it fit, how fast
#   paceline run FILE     train it
#
# Sizes take units: 7B, 80 GiB, 400Gb/s, 30m.
"""


def job_template() -> str:
    """A whole job file as text, with the help of every field above it."""
    return _HEADER + "".join(_lines(JobSpec, _STARTED, depth=0))


def _lines(section: Any, given: dict[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for field in fields(section):
        info = section.__pydantic_fields__[field.name]
        help_text = " ".join((info.description or "").split())
        inner = section_in(field.type)
        if depth == 0:
            yield "\n"
        for line in textwrap.wrap(help_text, width=96 - len(indent)):
            yield f"{indent}# {line}\n"
        if inner is not None and (field.name in given or depth == 0):
            yield f"{indent}{field.name}:\n"
            values = given.get(field.name, {})
            yield from _lines(inner, values, depth + 1)
        elif field.name in given:
            yield f"{indent}{field.name}: {_text(given[field.name])}\n"
        else:
            default = info.get_default(call_default_factory=True)
            is_section = is_dataclass(default) and not isinstance(default, type)
            shown = asdict(default) if is_section else default
            yield f"{indent}# {field.name}: {_text(shown)}\n"


def _text(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.replace("\n...", "").strip()
