"""The lock of the developers' environment has the versions that are tested, and every hash."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
LOCKED = {
    canonicalize_name(name): (version, hashes)
    for name, version, hashes in re.findall(
        r"(?m)^([\w.-]+)==([^\s;]+)[^\\\n]*((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$",
        (ROOT / "requirements-dev.txt").read_text(),
    )
}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_package_of_the_lock_has_a_hash():
    packages = re.findall(r"(?m)^[\w.-]+(?=[=<>~ @])", (ROOT / "requirements-dev.txt").read_text())
    assert {canonicalize_name(name) for name in packages} == LOCKED.keys()


def test_the_lock_has_the_versions_that_are_tested():
    tested = pinned()
    wrong = {
        name: (version, tested[name])
        for name, (version, _) in LOCKED.items()
        if tested.get(name, version) != version
    }
    assert wrong == {}, "run scripts/lock"


def test_the_lock_has_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        Requirement(text)
        for group in (
            project["dependencies"],
            *(extras[name] for name in ("train", "report", "live", "dev", "tensorboard")),
        )
        for text in group
    ]
    wrong = [
        str(each)
        for each in asked
        if not each.specifier.contains(LOCKED.get(canonicalize_name(each.name), ("0",))[0])
    ]
    assert wrong == [], "run scripts/lock"
