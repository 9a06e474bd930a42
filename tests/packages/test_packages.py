"""What a user installs: wheel and source distribution, built and installed without a network."""

import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import paceline

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it, as an index would have them."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "hatchling", "build", "-d", out)
    run(*build, "-t", "sdist", cwd=ROOT)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    run(*build, "-t", "wheel", cwd=out / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of an environment that holds the wheel and the packages it declares, no others."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", built[1])
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in closure(PROJECT["dependencies"]):
        distribution = metadata.distribution(package)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin"


def closure(requirements: list[str]) -> set[str]:
    """Names of the packages that these requirements ask for here, and theirs in turn."""
    wanted, found = list(requirements), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in found or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found.add(requirement.name)
        wanted += metadata.requires(requirement.name) or ()
    return found


def test_the_wheel_has_the_licences_the_types_the_schema_and_the_code(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        (about,) = (name for name in names if name.endswith("/METADATA"))
        fields = Parser().parsestr(wheel.read(about).decode())
        schema = json.loads(wheel.read("paceline/job.schema.json"))
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/paceline").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources - names == set()
    guides = {f"paceline/guides/{path.name}" for path in (ROOT / "docs/guides").glob("*.md")}
    assert guides - names == set()
    assert fields["License-Expression"] == "Apache-2.0 AND MIT"
    for licence in fields.get_all("License-File"):
        assert f"{Path(about).parent}/licenses/{licence}" in names
    assert fields["Requires-Python"] == PROJECT["requires-python"]
    assert "cluster" in schema["properties"]
    text = fields.get_payload()
    assert text.startswith("# Paceline")
    assert "](" not in text, "an index page has no folder for a relative link to lead into"


def test_the_source_distribution_has_what_git_has(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).split() if (ROOT / ".git").exists() else []
    assert {"tests/packages/test_packages.py", "LICENSE", "constraints.txt", "test"} <= names
    assert {name for name in tracked if (ROOT / name).exists()} - names <= {".ci/run"}


def test_the_installed_command_plans_with_only_the_packages_it_declares(installed):
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    version = run(installed / "paceline", "--version", env=alone)
    assert re.search(rf"\b{re.escape(paceline.__version__)}\b", version)
    example = ROOT / "examples/plan-70b/job.yaml"
    plan = run(installed / "paceline", "plan", example, "--json", env=alone, cwd=installed)
    assert json.loads(plan)
    asked = "from importlib.util import find_spec as at; print(at('paceline').origin, at('torch'))"
    where, torch = run(installed / "python", "-c", asked, env=alone).split()
    assert Path(where).is_relative_to(installed.parent)
    assert torch == "None"


def test_all_that_name_a_version_name_the_same_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == paceline.__version__
    for page in ("CHANGELOG.md", "docs/release-notes.md"):
        newest = re.search(r"(?m)^## (\d+\.\d+\.\d+)", (ROOT / page).read_text())
        assert newest is not None
        assert newest[1] == paceline.__version__


def test_the_image_copies_only_what_its_context_has():
    """`.dockerignore` leaves out all but a few; a COPY of anything else fails at the build."""
    lines = (ROOT / ".dockerignore").read_text().split()
    context = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = [
        word
        for line in (ROOT / "Containerfile").read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert copied
    assert set(copied) == context
    assert all((ROOT / name).exists() for name in copied)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    beside = wheel["targets"]["wheel"]
    assert {*beside["force-include"], *beside["shared-data"]} <= set(copied)
