"""The problems Paceline itself reports, from `codes.md`: a section for each code such as `J003`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code and the text that explains it."""

    code: str
    about: str
    """What its letter looks at, such as `the job file`."""

    text: str
    """Markdown: why it is refused, and the fix."""


@cache
def codes_page() -> str:
    """The whole page of codes, as docs/reference/codes.md has it."""
    return (files("paceline.catalog") / "codes.md").read_text(encoding="utf-8")


@cache
def load_codes() -> Mapping[str, Code]:
    """Every code in the order of the page."""
    found: dict[str, Code] = {}
    about = ""
    for section in re.split(r"^(?=##)", codes_page(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.startswith("### "):
            name = heading.removeprefix("### ").strip()
            found[name] = Code(code=name, about=about, text=text.strip())
        else:
            about = heading.partition(":")[2].strip()
    return found
