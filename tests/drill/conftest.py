"""Where drills run."""

from collections.abc import Iterator

import pytest
from tests.run.scene import Scene, use_double


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """One folder for each transport, so that a drill finds the undisturbed run of the first."""
    scene = Scene(tmp_path_factory.mktemp("drills"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "double":
            use_double(monkeypatch, LATE="any 1", AFTER_ABORT="any", CONTAGION="1")
            scene.job["model"] = {"decoder": {"layers": 1, "hidden": 16, "heads": 2}}
            scene.job["data"]["seq_len"] = 16
            scene.write_job()
        yield scene
