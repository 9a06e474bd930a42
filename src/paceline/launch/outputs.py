"""What a run's job asks for besides the state: continuations of prompts, and tasks of
lm-evaluation-harness.

Once the run is over, the model of each checkpoint that they are asked of is exported into a folder
that is removed again, and processes of their own load it.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.job import Job
from paceline.job.evaluate_rules import num_best
from paceline.job.prompts import read_prompts
from paceline.job.sources import find_tokenizer
from paceline.job.tasks import read_tasks
from paceline.launch.export import export, plan_export
from paceline.launch.helper import NoAnswer, ask
from paceline.record.checkpoints import checkpoint_step
from paceline.record.find_checkpoints import checkpoint_of_run
from paceline.record.outputs import Generation, Outputs, Score, read_outputs, write_outputs
from paceline.record.run import RunFolder
from paceline.record.run_row import read_row


def lacks_outputs(run: RunFolder) -> bool:
    """Whether a run is finished whose prompts and tasks were not done: its command was killed."""
    evaluate = run.job().spec.evaluate
    if evaluate.prompts is None and not evaluate.tasks:
        return False
    found, summary = read_outputs(run.path), read_row(run.path)
    return summary.state == "finished" and (found is None or found.last_step != summary.step)


def make_outputs(run: RunFolder, on_made: Callable[[Outputs], None]) -> None:
    """Write into the run's folder what its model makes of prompts and tasks: the model of the best
    checkpoint where the run keeps it, else of the newest, and that of each chosen step.

    What fails is a `problem` of the outputs: the run is finished all the same.
    """
    job, last_step = run.job(), read_row(run.path).step
    outputs = _make(run, job, None)
    on_made(outputs)
    every, chosen = job.spec.evaluate.outputs_every, list[Outputs]()
    for step in range(every, last_step + 1, every) if every is not None else ():
        if step != outputs.step:
            chosen.append(_make(run, job, step))
            on_made(chosen[-1])
    outputs = msgspec.structs.replace(outputs, chosen=tuple(chosen), last_step=last_step)
    write_outputs(run.path, outputs)


def _make(run: RunFolder, job: Job, step: int | None) -> Outputs:
    """Make the outputs of a step's checkpoint; None: of the one that stands for the run."""
    outputs, problems = Outputs(step=step or 0), list[str]()
    try:
        is_best = step is None and num_best(job.spec) > 0
        checkpoint = checkpoint_of_run(run.path, step=step, best=is_best)
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
    return msgspec.structs.replace(outputs, problem="; ".join(problems) or None)


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
