"""Pipelines on this machine, without Kubernetes: every step a process, by kfp's own local runner.

Each run is a folder of `pipeline_runs/`, with `run.json` and what the steps made.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from paceline.contracts.skills.kfp_program import COMPILED, PipelineError, run_program
from paceline.contracts.skills.messages.kubeflow import (
    Action,
    Answer,
    Artifact,
    Request,
    RunSummary,
)

_FOLDER = "pipeline_runs"


class Here:
    """The runs in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = folder / _FOLDER

    def run(self, request: Request) -> Answer:
        """To its end. A run that fails is kept as well."""
        assert request.pipelinePath is not None
        path = self._folder / request.pipelinePath
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        place = self._runs / run_id
        place.mkdir(parents=True)
        name = request.runConfig.runName or path.stem
        known = {"name": name, "experiment": request.runConfig.experimentName}
        given = request.pipelineConfig.parameters | request.runConfig.arguments
        try:
            run_program("local", path, place / "outputs", given)
        except PipelineError as error:
            _write(place, known | {"status": "failed", "message": str(error)})
            return replace(self.get(run_id, "run"), status="error")
        except BaseException:
            _write(place, known | {"status": "canceled"})
            raise
        _write(place, known | {"status": "succeeded"})
        return self.get(run_id, "run")

    def get(self, run_id: str, action: Action) -> Answer:
        """A run as it was kept.

        Raises:
            PipelineError: There is none of that id.
        """
        known = self._read(run_id)
        place = self._runs / run_id
        return Answer(
            status="success",
            action=action,
            runId=run_id,
            runStatus=known["status"],
            artifacts=list(_artifacts(place)),
            dashboardUrl=place.resolve().as_uri(),
            message=known.get("message"),
        )

    def list_runs(self, experiment: str) -> list[RunSummary]:
        """Runs of an experiment, the newest first."""
        found = []
        for path in sorted(self._runs.glob("*/run.json"), reverse=True):
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["experiment"] == experiment:
                run_id = path.parent.name
                found.append(
                    RunSummary(runId=run_id, runName=known["name"], runStatus=known["status"])
                )
        return found

    def delete(self, run_id: str) -> None:
        """A run and what it made.

        Raises:
            PipelineError: There is none of that id.
        """
        self._read(run_id)
        shutil.rmtree(self._runs / run_id)

    def _read(self, run_id: str) -> dict[str, Any]:
        path = self._runs / run_id / "run.json"
        if Path(run_id).name != run_id or not path.is_file():
            raise PipelineError(f"there is no run {run_id} in {_FOLDER}")
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return known


def _write(place: Path, known: dict[str, Any]) -> None:
    (place / "run.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _artifacts(place: Path) -> Iterator[Artifact]:
    """What each step made, as kfp's executor says it in the step's own file."""
    kinds = _kinds(place / COMPILED)
    for path in sorted((place / "outputs").rglob("executor_output.json")):
        said = json.loads(path.read_text(encoding="utf-8"))
        for name, each in said.get("artifacts", {}).items():
            for one in each.get("artifacts", []):
                step = path.parent.name
                kind = kinds.get((step, name), "system.Artifact")
                yield Artifact(name=f"{step}.{name}", uri=one.get("uri", ""), type=kind)


def _kinds(compiled: Path) -> dict[tuple[str, str], str]:
    """(step, output) -> its type, of the pipeline's own steps."""
    if not compiled.is_file():
        return {}
    spec: dict[str, Any] = next(iter(yaml.safe_load_all(compiled.read_text(encoding="utf-8"))))
    found = {}
    for step, task in spec["root"]["dag"]["tasks"].items():
        component = spec["components"][task["componentRef"]["name"]]
        outputs = component.get("outputDefinitions", {}).get("artifacts", {})
        for name, each in outputs.items():
            found[step, name] = each["artifactType"].get("schemaTitle", "system.Artifact")
    return found
