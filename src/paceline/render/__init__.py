"""Hand over: a plan becomes the files of the engine that people already have. Pure: no files are
written here, no engine is imported.

One module per engine, listed in `ENGINES`; each has `render(plan, job)` and `gaps(plan, job)`.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from paceline.errors import JobError, Problem, did_you_mean
from paceline.job import Job
from paceline.plan import Plan
from paceline.profile import ModuleFacts, resolve_decoder, resolve_profile
from paceline.render.carried import left_out
from paceline.render.engine import Engine, EngineModule, Files, Gap, RenderError
from paceline.render.example import without_own_program

__all__ = [
    "ENGINES",
    "Engine",
    "Files",
    "Gap",
    "RenderError",
    "Rendered",
    "check_files",
    "check_model",
    "find",
    "render_job",
    "renderer_of",
]

ENGINES: Mapping[str, Engine] = {
    "slurm": Engine(
        title="Slurm, torchrun on every node",
        module="paceline.render.slurm",
        versions="Slurm 22.05",
        validated="shellcheck; job.sbatch, and the agents of a run, submitted to Slurm 22.05 of "
        "three nodes, one lost",
    ),
    "torchrun": Engine(
        title="torchrun",
        module="paceline.render.torchrun",
        versions="torch 2.11 to 2.13",
        validated="shellcheck; run with torch 2.13 on 2 and 4 ranks over gloo, a rank killed, "
        "one node of two lost",
    ),
    "accelerate": Engine(
        title="Hugging Face Accelerate",
        module="paceline.render.accelerate",
        versions="accelerate 1.10 to 1.15",
        validated="its config loader, launch parser and FSDP plugin; run with 1.15 on 2 and 4 "
        "ranks: DDP, FSDP2, DeepSpeed's ZeRO-1",
    ),
    "deepspeed": Engine(
        title="DeepSpeed",
        module="paceline.render.deepspeed",
        versions="deepspeed 0.16 to 0.19",
        validated="its DeepSpeedConfig, and its keys; run with 0.19 on 2 ranks: ZeRO-1, 2, 3, "
        "offload to the CPU",
    ),
    "megatron": Engine(
        title="Megatron-LM",
        module="paceline.render.megatron",
        versions="Megatron-LM core_v0.16.1",
        validated="megatron-core 0.16.1: its TransformerConfig and pipeline layout; flags against "
        "a list from its arguments.py; not run: it needs GPUs",
    ),
    "megatron-bridge": Engine(
        title="Megatron Bridge",
        module="paceline.render.megatron_bridge",
        versions="megatron-bridge 0.3",
        validated="megatron-bridge 0.3.1: its config classes, with a stand-in for Transformer "
        "Engine; not run: it needs GPUs",
    ),
    "torchtitan": Engine(
        title="torchtitan",
        module="paceline.render.torchtitan",
        versions="torchtitan 0.3",
        validated="torchtitan 0.3.0: its parser, its Trainer.Config, the model built on the meta "
        "device; not run: it needs GPUs",
    ),
    "network": Engine(
        title="The nodes' network",
        module="paceline.render.network",
        versions="NCCL 2.2x, gloo; torch 2.11 to 2.13",
        validated="shellcheck; the sweep run with torch 2.13 on 2 ranks over gloo",
    ),
    "mlx": Engine(
        title="MLX",
        module="paceline.render.mlx",
        versions="mlx 0.32",
        validated="MLX's own hostfile class and flags; run with mlx[cpu] 0.32.4 on 2 and 4 ranks "
        "of the ring backend; not run: on Macs, or over JACCL",
    ),
    "tensorflow": Engine(
        title="TensorFlow",
        module="paceline.render.tensorflow",
        versions="tensorflow 2.21",
        validated="TensorFlow's own resolver; run with tensorflow-cpu 2.21 on 2 workers",
    ),
    "ray": Engine(
        title="Ray Train and Tune, KubeRay",
        module="paceline.render.ray",
        versions="Ray 2.60, KubeRay 1.7",
        validated="RayJob's CRD schema; run with Ray 2.60 on 2 workers over gloo, one killed; a "
        "search with ASHA to its end; not run: on a KubeRay cluster",
    ),
    "kubernetes": Engine(
        title="Kubeflow Trainer v2 and the older training operator",
        module="paceline.render.kubernetes",
        versions="Trainer 2.3 (TrainJob, TrainingRuntime), training operator 1.9 (PyTorchJob)",
        validated="CRD schemas, every key; kubernetes-validate 1.37; not run: on a cluster",
    ),
    "kfp": Engine(
        title="Kubeflow Pipelines v2",
        module="paceline.render.kfp",
        versions="kfp 2.17",
        validated="compiled by kfp 2.17; run here with 2 ranks in its training step",
    ),
    "sky": Engine(
        title="SkyPilot",
        module="paceline.render.sky",
        versions="skypilot 0.14",
        validated="sky.Task.from_yaml, offline (skypilot 0.14.1); not run: nothing is rented",
    ),
    "modal": Engine(
        title="Modal",
        module="paceline.render.modal",
        versions="modal 1.6",
        validated="app.py imported by modal 1.6.4, offline; not run: nothing is rented",
    ),
    "runpod": Engine(
        title="RunPod",
        module="paceline.render.runpod",
        versions="runpod 1.7 to 1.12",
        validated="runpod 1.12's create_pod, offline; the pod's own command run here; not run: "
        "nothing is rented",
    ),
    "lambda": Engine(
        title="Lambda",
        module="paceline.render.lambda_cloud",
        versions="cloud API v1",
        validated="golden files; the program run here against a pretend API; not run: nothing is "
        "rented",
    ),
    "vertex": Engine(
        title="Google Vertex AI",
        module="paceline.render.vertex",
        versions="aiplatform v1",
        validated="google-cloud-aiplatform 2.7's CustomJobSpec, strictly; not run: nothing is "
        "rented",
    ),
}
"""Name on the command line -> the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One plan for one engine."""

    files: Files
    gaps: tuple[Gap, ...]
    """What they leave out, each with the nearest that they say instead."""


def find(name: str) -> Engine:
    """The engine of that name, or of a catalog engine whose files it writes.

    Raises:
        JobError: `H001`, naming the nearest.
    """
    engine = ENGINES.get(_RENDERERS.get(name, name))
    if engine is None:
        raise JobError.of(
            code="H001",
            what=f"there is no engine {name!r}",
            where="--for",
            fix=did_you_mean(name, ENGINES) or f"one of {', '.join(ENGINES)}",
        )
    return engine


def render_job(name: str, plan: Plan, job: Job, *, own_program: bool = True) -> Rendered:
    """The files that hand a plan to an engine.

    Args:
        name: One of `ENGINES`.
        plan: What `plan_job` chose for the job.
        job: The job, for what a plan does not hold: data, schedule, names.
        own_program: Whether somebody may still put a program of their own in the example's place.
            Where not, the files run as they are: what only such a program could do is refused.

    Raises:
        JobError: `H001`, there is no such engine; or the job cannot be written into its files.
        RenderError: `H002`, the engine cannot express the plan; one problem for each part.
    """
    module = cast(EngineModule, importlib.import_module(find(name).module))
    gaps = _gaps(module, plan, job, own_program=own_program)
    RenderError.raise_for(_refusals(name, gaps, job))
    return Rendered(files=module.render(plan, job), gaps=gaps)


def renderer_of(engine: str) -> str | None:
    """The row of `ENGINES` that writes files for an engine of the catalog; None where none does.

    >>> renderer_of("fsdp1"), renderer_of("maxtext")
    ('accelerate', None)
    """
    name = _RENDERERS.get(engine, engine)
    return name if name in ENGINES else None


_RENDERERS = {"fsdp1": "accelerate"}
"""Engine of the catalog -> row of `ENGINES`, where the two names differ."""


def check_files(plan: Plan, job: Job, *, own_program: bool = True) -> Iterator[Problem]:
    """What keeps the files of the plan's own engine from being written, as `render_job` refuses it;
    nothing where Paceline writes none for it."""
    name = renderer_of(plan.engine)
    if name is not None:
        module = cast(EngineModule, importlib.import_module(find(name).module))
        yield from _refusals(name, _gaps(module, plan, job, own_program=own_program), job)


def check_model(job: Job, facts: ModuleFacts | None = None) -> Iterator[Problem]:
    """What keeps files of the job's engine from describing its model, whatever the layout."""
    name = renderer_of(job.spec.engine)
    if name is not None:
        module = importlib.import_module(find(name).module)
        gaps = getattr(module, "model_gaps", None)
        if gaps is not None:
            found = gaps(resolve_profile(job, facts), resolve_decoder(job))
            yield from _refusals(name, tuple(found), job)


def _gaps(module: EngineModule, plan: Plan, job: Job, *, own_program: bool) -> tuple[Gap, ...]:
    own = module.gaps(plan, job)
    found = (*own, *left_out(job, module.CARRIES, {gap.where for gap in own}))
    return found if own_program else tuple(without_own_program(found, _OWN_PROGRAM))


_OWN_PROGRAM = (
    "a program of your own: `paceline run --script train.py --with ENGINE JOB`, or "
    "kubernetes.script"
)
"""What to do about a gap that only such a program fills."""


def _refusals(name: str, gaps: tuple[Gap, ...], job: Job) -> list[Problem]:
    """`H002` for each gap that nothing comes near."""
    return [
        Problem(
            code="H002",
            what=f"{name} cannot express {gap.what}: {gap.why}",
            where=job.where(gap.where),
            fix=gap.fix or "choose another engine: `paceline render --for list`",
        )
        for gap in gaps
        if gap.nearest is None
    ]
