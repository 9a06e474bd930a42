"""The install line of a fix works from a clone, a wheel, a repository and an index."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.job import packages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Paceline as installed into site-packages, with this direct_url.json."""

    def place(told: dict[str, object] | None) -> str:
        text = None if told is None else json.dumps(told)
        package = tmp_path / "lib/site-packages/paceline/job/packages.py"
        monkeypatch.setattr(packages, "__file__", str(package))
        monkeypatch.setattr(
            packages, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
        )
        packages._source.cache_clear()
        return packages.install_line("lint")

    yield place
    packages._source.cache_clear()


def test_a_clone_is_installed_from_its_folder_wherever_one_is(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert packages.install_line("lint") == "pip install '.[lint]'"
    monkeypatch.chdir(tmp_path)
    assert packages.install_line("lint") == f"pip install '{ROOT}[lint]'"


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (None, "pip install 'paceline[lint]'"),
        ({"url": "file:///a%20b/p.whl", "archive_info": {}}, "pip install '/a b/p.whl[lint]'"),
        (
            {"url": "https://x/p", "vcs_info": {"vcs": "git"}},
            "pip install 'paceline[lint] @ git+https://x/p'",
        ),
    ],
)
def test_an_installed_one_is_extended_from_where_it_came(installed, told, line):
    assert installed(told) == line
