"""What a run's job asks for at its end besides the state: continuations of prompts, and tasks of
lm-evaluation-harness.

The model is exported into a folder that is removed again, and processes of their own load it.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.launch.export import export, plan_export
from paceline.record.checkpoints import checkpoint_step
from paceline.record.find_checkpoints import checkpoint_of_run
from paceline.record.outputs import Generation, Outputs, Score, write_outputs
from paceline.record.run import RunFolder
from paceline.spec import Job
from paceline.spec.evaluate import num_best
from paceline.spec.prompts import read_prompts
from paceline.spec.sources import find_tokenizer
from paceline.spec.tasks import read_tasks

_DOING = {"generate": "generating", "harness": "evaluating tasks"}
"""Module of `paceline.runtime` -> what its process does."""


def make_outputs(run: RunFolder) -> Outputs:
    """What the run's model makes of its prompts and tasks, also written into the run's folder: the
    model of the best checkpoint where the run keeps it, else of the newest.

    What fails is a `problem` of the outputs: the run is finished all the same.
    """
    job, outputs, problems = run.job(), Outputs(step=0), list[str]()
    try:
        checkpoint = checkpoint_of_run(run.path, best=num_best(job.spec) > 0)
        outputs = Outputs(step=checkpoint_step(checkpoint.name) or 0)
        with TemporaryDirectory(dir=run.path, prefix=".outputs-") as folder:
            model = _exported(run, job, checkpoint, Path(folder, "model"))
            for name, make in (("generations", _generations), ("scores", _scores)):
                try:
                    outputs = msgspec.structs.replace(outputs, **{name: make(job, model)})
                except (PacelineError, subprocess.CalledProcessError) as error:
                    problems.append(_reason(error))
    except PacelineError as error:
        problems.append(_reason(error))
    if problems:
        outputs = msgspec.structs.replace(outputs, problem="; ".join(problems))
    write_outputs(run.path, outputs)
    return outputs


def _exported(run: RunFolder, job: Job, checkpoint: Path, out: Path) -> str:
    """The folder of the exported model.

    Raises:
        PacelineError: The model cannot be exported.
    """
    asked = plan_export(run, checkpoint, out, merge=job.spec.train.adapter is not None)
    export(asked, lambda exported: "", check=False)
    return str(asked.out)


def _generations(job: Job, model: str) -> tuple[Generation, ...]:
    """
    Raises:
        PacelineError: The prompts cannot be read.
        CalledProcessError: The process that generates failed.
    """
    prompts = read_prompts(job)
    if not prompts:
        return ()
    request = {
        "folder": model,
        "prompts": prompts,
        "num_tokens": job.spec.evaluate.prompt_tokens,
        "is_bytes": find_tokenizer(job) is None,
    }
    return msgspec.json.decode(_answer("generate", request), type=tuple[Generation, ...])


def _scores(job: Job, model: str) -> tuple[Score, ...]:
    """
    Raises:
        PacelineError: The tasks cannot be read.
        CalledProcessError: The process that evaluates failed.
    """
    tasks = read_tasks(job)
    if not tasks:
        return ()
    answer = _answer("harness", {"folder": model, "tasks": tasks})
    return msgspec.json.decode(answer, type=tuple[Score, ...])


def _answer(module: str, request: dict[str, Any]) -> bytes:
    """The last line that a process of ours prints; nothing is downloaded.

    Raises:
        CalledProcessError: It failed.
    """
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    done = subprocess.run(
        [sys.executable, "-m", f"paceline.runtime.{module}"],
        input=msgspec.json.encode(request),
        capture_output=True,
        check=True,
        env={**os.environ, **dict.fromkeys(offline, "1")},
    )
    return done.stdout.splitlines()[-1]


def _reason(error: PacelineError | subprocess.CalledProcessError) -> str:
    if isinstance(error, PacelineError):
        return "; ".join(problem.what for problem in error.problems)
    doing = _DOING[error.cmd[-1].rpartition(".")[2]]
    last = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"{doing} ended with {error.returncode}: {last[0][:300]}"
