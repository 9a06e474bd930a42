"""The problems Paceline itself reports (`codes.md`, a section for each code such as `J003`), what
people ask before they choose (`topics.md`), and the guides of docs/guides."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

GUIDE = "a guide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code and the text that explains it."""

    code: str
    about: str
    """What its letter looks at, such as `the job file`; of a topic, `how to choose`; `GUIDE`."""

    text: str
    """Markdown: the fault in its first sentence, why it is refused, and the fix."""

    @property
    def title(self) -> str:
        """The first sentence, which names the fault.

        >>> load_codes()["L004"].title
        'The degrees that you fixed do not multiply to a divisor of the ranks'
        """
        return _split(self.text)[0]

    @property
    def rest(self) -> str:
        """What follows the title."""
        return _split(self.text)[1]


@cache
def page(name: str) -> str:
    """A whole page, as docs/reference has it: `codes.md` or `topics.md`."""
    text = (files("paceline.catalog") / name).read_text(encoding="utf-8")
    return text.replace("](../../../docs/", "](../")


def _split(text: str) -> tuple[str, str]:
    """The first sentence of the first paragraph without its full stop, and the rest."""
    paragraph, gap, more = text.partition("\n\n")
    sentence, _, rest = " ".join(paragraph.split()).partition(". ")
    return sentence.removesuffix("."), (rest + gap + more).strip()


@cache
def load_codes() -> Mapping[str, Code]:
    """Every topic and every code, in the order of their pages."""
    found: dict[str, Code] = {}
    about = ""
    for section in re.split(r"^(?=##)", page("topics.md") + page("codes.md"), flags=re.MULTILINE):
        heading, _, text = section.partition("\n")
        if heading.startswith("### "):
            name = heading.removeprefix("### ").strip()
            found[name] = Code(code=name, about=about, text=text.strip())
        elif heading.startswith("## "):
            about = heading.partition(":")[2].strip()
    return found


@cache
def load_guides() -> Mapping[str, Code]:
    """Every guide by its name. A wheel has them beside the modules, a clone in docs/guides."""
    package = Path(str(files("paceline")))
    folders = (package / "guides", package.parents[1] / "docs" / "guides")
    pages = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    return {
        page.stem: Code(code=page.stem, about=GUIDE, text=page.read_text(encoding="utf-8"))
        for page in pages
    }
