"""Run code in an engine's Python, offline, and read the JSON that it prints last."""

import json
from pathlib import Path
from typing import Any

from tests.engines.runs import start


def read_offline(python: Path, folder: Path, code: str, **environment: str) -> Any:
    """The value of the last line."""
    output = start(
        [str(python), "-c", code],
        folder,
        python=python,
        environment={"HOME": str(folder)} | environment,
    )
    return json.loads(output.splitlines()[-1])
