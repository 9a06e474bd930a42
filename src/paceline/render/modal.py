"""Modal: one function with all its GPUs in one container, which runs torchrun there.

The container lives as long as the function: nothing idles after it, and it is billed by the second.
"""

from collections.abc import Iterator

from paceline.job import Job
from paceline.plan import Plan
from paceline.render import cloud, torchrun
from paceline.render.carried import OF_DDP
from paceline.render.cloud import GUARD, limits_of, named
from paceline.render.engine import Files, Gap
from paceline.render.example import example
from paceline.render.shell import script
from paceline.render.text import commented, header
from paceline.units import format_seconds

GPUS = {
    "T4": "T4",
    "L4": "L4",
    "L40S": "L40S",
    "A10": "A10",
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "H100-SXM": "H100!",
    "H200": "H200",
    "B200": "B200",
}
"""Our name -> Modal's. `H100!` is an H100 and never an H200 in its place. Source:
modal.com/docs/guide/gpu."""

_MOST_GPUS, _MOST_A10 = 8, 4
_LONGEST_S = 86_400
"""Most seconds of one call. Source: modal.com/docs/guide/timeouts."""

CARRIES = OF_DDP | {"cloud", "recovery.max_restarts", "recovery.shrink"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`app.py`, `submit.sh`, torchrun's files, the guard, and what is said of secrets."""
    secrets = job.spec.cloud.secrets
    return {
        "app.py": _app(plan, job),
        "submit.sh": script(
            header(plan, job, "Runs app.py on Modal; what it prints is printed here."),
            'cd "$(dirname "$0")"',
            *cloud.need_lines(*secrets),
            'exec modal run "$@" app.py',
        ),
        "launch.sh": torchrun.launch_script(plan, job),
        **cloud.secret_files(job, "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
        **example(plan, job, "train_torchrun.py", "lm.py", GUARD),
    }


def gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """torchrun's, several nodes, spot, and more than a day."""
    yield from torchrun.gaps(plan, job)
    yield from cloud.data_gap(job)
    yield from cloud.one_machine(plan, "modal")
    if job.spec.plan.spot:
        yield Gap(
            what="spot machines",
            where="plan.spot",
            why="Modal may take a GPU's container away at any time, at one price",
            nearest="the function is started again, from its newest checkpoint",
            fix="plan.spot: false",
        )
    if job.spec.cloud.storage is not None:
        yield Gap(
            what=f"checkpoints in {job.spec.cloud.storage}",
            where="cloud.storage",
            why="a bucket needs its own keys on Modal",
            nearest="they are in a Modal Volume with the job's name",
        )
    if job.spec.cloud.region is not None:
        yield Gap(
            what=f"the region {job.spec.cloud.region}",
            where="cloud.region",
            why="Modal bills a choice of region apart",
            nearest="wherever Modal has the GPUs",
        )
    if limits_of(plan, job, ("modal",)).max_run_s > _LONGEST_S:
        yield Gap(
            what="a run of more than a day",
            where="cloud.max_run",
            why="a call of Modal ends after 24 hours",
            nearest="it ends after 24 hours: submit.sh again resumes from its checkpoints",
        )


def _app(plan: Plan, job: Job) -> str:
    asked, cluster = job.spec.cloud, plan.cluster
    limits = limits_of(plan, job, ("modal",))
    most = _MOST_A10 if cluster.accelerator == "A10" else _MOST_GPUS
    gpu = named(plan, job, GPUS, provider="Modal", counts=range(1, most + 1))
    timeout_s = min(_LONGEST_S, round(limits.max_run_s))
    words: list[str] = limits.words("bash", "launch.sh", spent="/checkpoints/spent-seconds")
    base = (
        'modal.Image.debian_slim(python_version="3.12").pip_install("torch", "transformers")'
        if asked.image is None
        else f'modal.Image.from_registry({asked.image!r}, add_python="3.12")'
    )
    about = header(
        plan, job, *limits.lines, f"Modal itself ends it after {format_seconds(timeout_s)}."
    )
    setup = f".run_commands({', '.join(map(repr, asked.setup))})" if asked.setup else ""
    secrets = (
        f"[modal.Secret.from_local_environ({list(asked.secrets)!r})] if modal.is_local() else []"
        if asked.secrets
        else "[]"
    )
    return (
        commented(about)
        + f'''"""Trains on Modal: `bash submit.sh`."""

import pathlib
import shutil
import subprocess
import threading

import modal

HERE = pathlib.Path(__file__).parent
WORDS = {words!r}
app = modal.App({job.spec.name!r})
image = {base}{setup}.add_local_dir(HERE, "/job", copy=False)
checkpoints = modal.Volume.from_name({f"{job.spec.name}-checkpoints"!r}, create_if_missing=True)
secrets = {secrets}  # values come from your environment


def unpack(job: pathlib.Path, work: pathlib.Path, kept: pathlib.Path) -> None:
    """A fresh copy of the files; a retry may come into the container of the attempt before it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(job, work, ignore=shutil.ignore_patterns("checkpoints"))
    (work / "checkpoints").symlink_to(kept)


@app.function(
    image=image,
    gpu="{gpu}:{cluster.ranks_per_node}",
    timeout={timeout_s},
    retries={0 if job.spec.recovery.max_restarts == 0 else min(job.spec.recovery.max_restarts, 10)},
    max_containers=1,
    volumes={{"/checkpoints": checkpoints}},
    secrets=secrets,
)
def train() -> None:
    """torchrun on all GPUs of the container; checkpoints are kept as they are written."""
    unpack(pathlib.Path("/job"), pathlib.Path("/work"), pathlib.Path("/checkpoints"))
    done = threading.Event()

    def keep() -> None:
        while not done.wait(60):
            checkpoints.commit()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        code = subprocess.run(WORDS, cwd="/work", check=False).returncode
        if code in (124, 125):  # the guard ended it: a retry would spend more
            print("ended by the guard, see above")
        elif code:
            raise SystemExit(code)
    finally:
        done.set()
        keeper.join()
        checkpoints.commit()


@app.local_entrypoint()
def main() -> None:
    """Waits for the end."""
    train.remote()
'''
    )
