"""Weights & Biases, online or into files that `wandb sync` uploads."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from paceline.launch.sinks import Told


@contextmanager
def open_sink(told: Told) -> Iterator["_Wandb"]:
    """The sink. The run's id is fixed, so that a part of the run that follows has the same one.

    Steps are given with every row, and W&B takes none twice: what a sink that was killed had sent
    already is left out.
    """
    settings, offline = told.settings, told.settings["mode"] == "offline"
    if offline:
        _remove_unsent(told)
        # Read by wandb when it is imported; it would send its own telemetry in every mode.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    run = wandb.init(
        project=settings["project"],
        entity=settings["entity"],
        name=told.run.name,
        id=told.id,
        resume=None if offline else "allow",
        mode=settings["mode"],
        dir=str(told.run),
        config=dict(told.job),
        # Of this process they would say nothing of the run.
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            silent=True,
        ),
    )
    print(f"{run.url or run.dir}")
    try:
        yield _Wandb(wandb, run)
    finally:
        run.finish()


class _Wandb:
    def __init__(self, wandb: Any, run: Any) -> None:
        self._wandb, self._run = wandb, run

    def begin(self, done: int) -> None:
        """W&B knows by the step what it has."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def media(self, step: int, at: float, name: str, file: Path) -> None:
        if file.suffix == ".png":
            self._run.log({name: self._wandb.Image(str(file))}, step=step)
        else:
            shown = f"<pre>{escape(file.read_text())}</pre>"
            text = self._wandb.Html(shown, inject=False)
            self._run.log({name: text}, step=step)

    def flush(self) -> None:
        """W&B does not say what has arrived until it is closed."""


def _remove_unsent(told: Told) -> None:
    """Files that were not uploaded: everything is written again, and W&B replaces a run by the
    newest upload."""
    for folder in (told.run / "wandb").glob(f"offline-run-*-{told.id}"):
        if not any(folder.glob("*.synced")):
            shutil.rmtree(folder)
