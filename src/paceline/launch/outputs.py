"""What a run's job asks for at its end besides the state: continuations of prompts.

The model is exported into a folder that is removed again, and a process of its own loads it.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from paceline.errors import PacelineError
from paceline.launch.export import export, plan_export
from paceline.record.checkpoints import checkpoint_step
from paceline.record.find_checkpoints import checkpoint_of_run
from paceline.record.outputs import Generation, Outputs, write_outputs
from paceline.record.run import RunFolder
from paceline.spec import Job
from paceline.spec.evaluate import num_best
from paceline.spec.prompts import read_prompts
from paceline.spec.sources import find_tokenizer


def make_outputs(run: RunFolder) -> Outputs:
    """What the run's model makes of its prompts, also written into the run's folder: the model of
    the best checkpoint where the run keeps it, else of the newest.

    What fails is a `problem` of the outputs: the run is finished all the same.
    """
    job, step = run.job(), 0
    try:
        checkpoint = checkpoint_of_run(run.path, best=num_best(job.spec) > 0)
        step = checkpoint_step(checkpoint.name) or 0
        outputs = Outputs(step=step, generations=_generations(run, job, checkpoint))
    except (PacelineError, subprocess.CalledProcessError) as error:
        outputs = Outputs(step=step, problem=_reason(error))
    write_outputs(run.path, outputs)
    return outputs


def _generations(run: RunFolder, job: Job, checkpoint: Path) -> tuple[Generation, ...]:
    """
    Raises:
        PacelineError: The model cannot be exported.
        CalledProcessError: The process that generates failed.
    """
    prompts = read_prompts(job)
    with TemporaryDirectory(dir=run.path, prefix=".outputs-") as folder:
        asked = plan_export(
            run, checkpoint, Path(folder, "model"), merge=job.spec.train.adapter is not None
        )
        export(asked, lambda exported: "", check=False)
        request = {
            "folder": str(asked.out),
            "prompts": prompts,
            "num_tokens": job.spec.evaluate.prompt_tokens,
            "is_bytes": find_tokenizer(job) is None,
        }
        done = subprocess.run(
            [sys.executable, "-m", "paceline.runtime.generate"],
            input=msgspec.json.encode(request),
            capture_output=True,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[Generation, ...])


def _reason(error: PacelineError | subprocess.CalledProcessError) -> str:
    if isinstance(error, PacelineError):
        return "; ".join(problem.what for problem in error.problems)
    last = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"generating ended with {error.returncode}: {last[0][:300]}"
