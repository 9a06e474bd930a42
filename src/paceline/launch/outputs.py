"""What a run's job asks for at its end besides the state: continuations of prompts, and tasks of
lm-evaluation-harness.

The model is exported into a folder that is removed again, and processes of their own load it.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.launch.export import export, plan_export
from paceline.launch.helper import NoAnswer, ask
from paceline.record.checkpoints import checkpoint_step
from paceline.record.find_checkpoints import checkpoint_of_run
from paceline.record.outputs import Generation, Outputs, Score, write_outputs
from paceline.record.run import RunFolder
from paceline.spec import Job
from paceline.spec.evaluate import num_best
from paceline.spec.prompts import read_prompts
from paceline.spec.sources import find_tokenizer
from paceline.spec.tasks import read_tasks


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
            for name, (doing, module, kind, request_of) in _ASKED.items():
                try:
                    if request := request_of(job):
                        found = ask(module, {"folder": model, **request}, kind)
                        outputs = msgspec.structs.replace(outputs, **{name: found})
                except NoAnswer as error:
                    problems.append(f"{doing} {error}")
                except PacelineError as error:
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


def _prompts_of(job: Job) -> dict[str, Any]:
    prompts = read_prompts(job)
    if not prompts:
        return {}
    is_bytes = find_tokenizer(job) is None
    num_tokens = job.spec.evaluate.prompt_tokens
    return {"prompts": prompts, "num_tokens": num_tokens, "is_bytes": is_bytes}


def _tasks_of(job: Job) -> dict[str, Any]:
    tasks = read_tasks(job)
    return {"tasks": tasks} if tasks else {}


_ASKED: dict[str, tuple[str, str, Any, Callable[[Job], dict[str, Any]]]] = {
    "generations": ("generating", "generate", tuple[Generation, ...], _prompts_of),
    "scores": ("evaluating tasks", "harness", tuple[Score, ...], _tasks_of),
}
"""Field of the outputs -> what its process does, its module, what it answers, and what it is asked:
nothing where the job asks for none."""


def _reason(error: PacelineError) -> str:
    return "; ".join(problem.what for problem in error.problems)
