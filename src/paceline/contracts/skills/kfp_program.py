"""A person's pipeline file, handled in a process of its own: what it prints, changes or breaks is
its own.

    python -m paceline.contracts.skills.kfp_program compile FILE OUT
    python -m paceline.contracts.skills.kfp_program local FILE ROOT   arguments as JSON on stdin
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.contracts.skills.messages.kubeflow import PipelineConfig
from paceline.contracts.skills.words import exceptions_in, last_words, raised_in
from paceline.errors import PacelineError

COMPILED = "pipeline.yaml"
"""Beside what a local run's steps made."""


class PipelineError(PacelineError):
    """The pipeline, or the service that runs it, refuses: the answer's status is `error`."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__()

    def __str__(self) -> str:
        return self.message


def compile_pipeline(path: Path, config: PipelineConfig) -> Path:
    """The compiled file beside a pipeline's program; a compiled file is its own.

    Raises:
        PipelineError: It does not compile; with the reason.
    """
    if path.suffix != ".py":
        return path
    out = path.with_suffix(".yaml")
    given = {"name": config.name, "description": config.description, "values": config.parameters}
    run_program("compile", path, out, given)
    return out


def run_program(act: str, path: Path, out: Path, given: dict[str, Any]) -> None:
    """This module as a program, to its end; what it prints goes to standard error.

    Raises:
        PipelineError: It failed; with its last words.
    """
    command = [sys.executable, "-m", __name__, act, str(path.resolve()), str(out.resolve())]
    done = subprocess.run(
        command,
        cwd=path.resolve().parent,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stdout)
    if done.returncode:
        last = last_words(done.stdout)
        # kfp's own last words name the step that failed, not the exception that ended it.
        *_, before = ["", *(each for each in exceptions_in(done.stdout) if each != last)]
        why = f" ({before[:400]})" if before else ""
        raise PipelineError(f"{raised_in(done.stdout, path.name) or f'{path.name}: '}{last}{why}")


def main() -> None:
    """One act, on one file."""
    from kfp import compiler, local

    act, path, out = sys.argv[1], sys.argv[2], sys.argv[3]
    given = json.loads(sys.stdin.read() or "{}")
    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path, act]  # some programs look at how they were started
    pipeline = _pipeline_of(runpy.run_path(path))
    if act == "compile":
        if given["description"]:
            pipeline.pipeline_spec.pipeline_info.description = given["description"]
        values = given["values"] or None
        compiler.Compiler().compile(
            pipeline, out, pipeline_name=given["name"], pipeline_parameters=values
        )
        return
    # Which kind each output is, only the compiled pipeline says.
    compiler.Compiler().compile(pipeline, str(Path(out).with_name(COMPILED)))
    local.init(
        runner=local.SubprocessRunner(use_venv=False), pipeline_root=out, raise_on_error=True
    )
    pipeline(**given)


def _pipeline_of(names: dict[str, Any]) -> Any:
    from kfp.dsl.graph_component import GraphComponent

    found = {id(each): each for each in names.values() if isinstance(each, GraphComponent)}
    if len(found) != 1:
        sys.exit(f"PipelineError: the file has {len(found)} pipelines (@dsl.pipeline), not one")
    return next(iter(found.values()))


if __name__ == "__main__":
    main()
