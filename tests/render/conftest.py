"""Golden files of engines."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.render import Rendered

GOLDEN = Path(__file__).parent / "golden"
PROGRAMS = {"train.py", "lm.py", "lm_plain.py", "mlx_check.py", "tf_config.py"}
PROGRAMS |= {
    "train_torchrun.py",
    "train_deepspeed.py",
    "tune_ray.py",
    "program.yaml",
    "pipeline.py",
}
PROGRAMS |= {"cloud_guard.py", "runpod_submit.py", "lambda_submit.py"}
"""Tested by running them, and not kept a second time."""


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, Rendered], None]:
    """`check_golden("torchrun/two-nodes", rendered)`: the files are those of that folder of
    `golden/`. With `--update-golden` they are written there instead."""

    def check(name: str, found: Rendered) -> None:
        folder = GOLDEN / name
        texts = {path: text for path, text in found.files.items() if path not in PROGRAMS}
        if request.config.getoption("--update-golden"):
            for path, text in texts.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        kept = {
            str(path.relative_to(folder)): _rounded(path.read_text())
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert {path: _rounded(text) for path, text in texts.items()} == kept

    return check


def _rounded(text: str) -> str:
    """Numbers to 12 digits: since Python 3.12 `sum` of floats rounds once, before at each step."""
    return re.sub(r"\d+\.\d{10,}(?:e-?\d+)?", lambda number: f"{float(number[0]):.12g}", text)
