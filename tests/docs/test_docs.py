"""The docs agree with the code: commands, codes, links, examples, generated pages."""

import ast
import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

import paceline
from paceline.cli import COMMANDS
from paceline.job import load_job
from paceline.plan import plan_job
from paceline.report.plan_text import plan_summary

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")


def generator():
    spec = importlib.util.spec_from_file_location(
        "generate_docs", ROOT / "scripts/generate_docs.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_generated_page_is_what_the_code_says():
    folder = ROOT / "docs/reference"
    pages = generator().PAGES
    compare = (
        "import pathlib, generate_docs; folder = pathlib.Path('docs/reference')\n"
        "for name, make in generate_docs.PAGES.items():\n"
        "    if (folder / name).read_text() != make(): print(name)"
    )
    # A process of its own: this one has help as it was imported, older than pages that were written
    # anew while the suite ran.
    stale = subprocess.run(
        [sys.executable, "-c", compare],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert stale.stdout == "", "run python scripts/generate_docs.py"
    written = {f"failures/{page.name}" for page in (folder / "failures").iterdir()}
    assert written == {name for name in pages if name.startswith("failures/")}


def codes_in_source() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        found.update(re.findall(r'"([JMDTLRCFS]\d{3}|[AHPWV]0\d\d)"', path.read_text()))
    return found


def test_every_code_has_a_section_and_every_section_a_code():
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs/reference/codes.md").read_text(), re.M)
    assert sorted(sections) == sorted(codes_in_source())


def test_every_local_link_leads_to_a_page_and_a_heading_on_it():
    links = [
        (page, target)
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if not target.startswith(("http://", "https://"))
    ]
    assert links
    broken = [f"{page.relative_to(ROOT)}: {to}" for page, to in links if not leads(page, to)]
    assert broken == []


def leads(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    other = (page.parent / path).resolve() if path else page
    return other.exists() and (not anchor or anchor in anchors(other))


@cache
def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_python_example_of_a_page_parses():
    blocks = [
        textwrap.dedent(block)
        for page in PAGES
        for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.M | re.S)
    ]
    assert blocks
    for block in blocks:
        ast.parse(block)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_a_page_and_is_in_the_readme(command):
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference/cli").glob("*.md"))
    assert f"## paceline {command}\n" in pages
    assert f"[`{command}`](" in (ROOT / "docs/reference/cli.md").read_text()
    assert re.search(rf"`(paceline )?{command}\b", (ROOT / "README.md").read_text())


def test_every_page_can_be_reached_from_the_index():
    index = ROOT / "docs/README.md"
    links = LINK.findall(index.read_text())
    linked = {(index.parent / link.split("#")[0]).resolve() for link in links}
    sets = {
        ROOT / "docs/reference" / name for name in ("failures", "cli")
    }  # of a page of that name
    pages = {
        page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent not in sets
    }
    assert pages - {index, *linked} == set()


def test_the_readmes_first_screen_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_names_the_two_commands_that_exist():
    readme = (ROOT / "README.md").read_text()
    for script in ("run", "test"):
        assert f"\n./{script}" in readme
        assert (ROOT / script).stat().st_mode & 0o111


def test_the_plan_that_the_readme_shows_is_the_plan_of_today():
    shown = re.search(r"```text\n(layout  .*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown is not None
    today = plan_summary(plan_job(load_job(ROOT / "examples/tiny-lm/job.yaml")))

    def words(lines: list[str]) -> list[str]:
        return [line.split()[0] for line in lines]  # numbers are a machine's own

    assert words(shown[1].splitlines()[: len(today)]) == words(today)


def modules_with_examples() -> list[str]:
    found = []
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        source = ROOT / "src" / Path(*module.name.split(".")).with_suffix(".py")
        if source.exists() and ">>> " in source.read_text():
            found.append(module.name)
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_run(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0


TEXT = (".md", ".py", ".yaml", ".toml", ".txt", ".sh")
"""Of the examples; what a run of one leaves there is none of them."""


def test_no_text_installs_paceline_from_an_index_that_does_not_have_it():
    """`pip install "paceline[lint]"` fetches whatever takes that name; `.[lint]` is the clone."""
    examples = [each for each in (ROOT / "examples").rglob("*.*") if each.suffix in TEXT]
    texts = [*PAGES, *(ROOT / "src").rglob("*.py"), *examples]
    by_name = re.compile(r"pip install[^\n`]*['\" ]paceline\[")
    allowed = {ROOT / "src/paceline/job/packages.py"}
    found = [str(each) for each in texts if by_name.search(each.read_text())]
    assert found == [str(each) for each in allowed]
