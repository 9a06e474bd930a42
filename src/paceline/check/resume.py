"""Whether a job can resume from a checkpoint: as it is, after a conversion, or not at all.

Judges what the checkpoint's own files say (`record/external_checkpoints.py`, or a manifest of ours)
against the job's plan. Leaves out whether the bytes are whole.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.errors import PacelineError, Problem
from paceline.parallel import Layout
from paceline.record.checkpoints import Manifest
from paceline.record.external_checkpoints import NAMES, ForeignCheckpoint
from paceline.units import counted


class Fit(StrEnum):
    """How a checkpoint and a job go together."""

    COMPATIBLE = "compatible"
    """The job reads it as it is."""

    CONVERTIBLE = "convertible"
    """After the commands that are named."""

    NOT = "not"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said before the launch."""

    fit: Fit
    checkpoint: str
    wrote: str
    """What it is and in which layout it was written."""

    wants: str
    """What would read it, in which layout."""

    keeps: str = ""
    """What of the training goes on."""

    why: Sequence[str] = ()
    commands: Sequence[str] = field(default_factory=tuple)
    """To run before, in this order."""


_READS = {
    "deepspeed": ("deepspeed", "megatron-deepspeed"),
    "megatron": ("megatron", "megatron-2021", "megatron-bridge"),
    "trainer": ("accelerate",),
    "accelerate": ("accelerate",),
    "dcp": ("torchtitan", "fsdp1"),
}
"""Kind -> engines of the catalog that read it as a training state."""

_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
"""Fields of a config.json that say which tensors there are."""

_ALL = "weights, optimizer, step"
_WEIGHTS = "weights alone: the optimizer and the data begin anew"
_START = "start"


def judge_run(
    checkpoint: str,
    manifest: Manifest | None,
    *,
    planned: Layout | PacelineError,
    refused: Sequence[Problem] = (),
) -> Verdict:
    """Whether a run resumes from its newest whole checkpoint.

    Args:
        checkpoint: Its folder; where the run has none, the folder of all.
        manifest: Of it; None where no checkpoint is valid.
        planned: The layout that the run would have, or why it cannot be resumed.
        refused: What is wrong with newer checkpoints.
    """
    about = Verdict(fit=Fit.NOT, checkpoint=checkpoint, wrote="nothing", wants="the job")
    if isinstance(planned, PacelineError):
        wrote = "Paceline" + (f", step {manifest.step}" if manifest is not None else "")
        why = [f"{each.code}: {each.what}; {each.fix}" for each in planned.problems]
        return replace(about, wrote=wrote, why=why)
    notes = [f"{problem.what}: an earlier one is taken" for problem in refused]
    if manifest is None:
        return replace(about, why=[*notes, "no checkpoint is valid: the run would begin anew"])
    verdict = judge_ours(manifest, checkpoint, layout=planned)
    return replace(verdict, why=[*verdict.why, *notes])


def judge_ours(
    manifest: Manifest, checkpoint: str, *, layout: Layout, digest: str | None = None
) -> Verdict:
    """Whether a job resumes from a checkpoint of ours: in any layout, if it trains the same.

    Args:
        digest: Of what the job trains; None where it is known to be the same.
    """
    mesh = ", ".join(f"{way} {degree}" for way, degree in manifest.mesh.items())
    wrote = f"Paceline, step {manifest.step}, {counted(manifest.world_size, 'rank')}"
    about = Verdict(
        fit=Fit.COMPATIBLE,
        checkpoint=checkpoint,
        wrote=wrote + (f": {mesh}" if mesh else ""),
        wants=f"paceline, {counted(layout.num_ranks, 'rank')}: {_degrees(layout)}",
        keeps=f"{_ALL}, data position",
        why=["any number of ranks reads it, in any layout"],
    )
    if digest is not None and manifest.job_digest not in (None, digest):
        why = "the job trains something else than it is of (model, data, program, batch, optimizer "
        return replace(about, fit=Fit.NOT, keeps="", why=[f"{why}or seed)"])
    if manifest.job_digest is None:
        return replace(about, keeps=_WEIGHTS)
    return about


def judge_foreign(
    found: ForeignCheckpoint,
    *,
    engine: str,
    layout: Layout,
    job: str,
    config: Mapping[str, Any] | None = None,
    damage: Sequence[Problem] = (),
) -> Verdict:
    """Whether a job resumes from what another program wrote.

    Args:
        engine: Of the job's plan, a name of the catalog.
        job: The job file, as commands name it.
        config: The config.json of the job's model, where it has one.
        damage: What is wrong with its files.
    """
    about = _About(found, engine, layout, job)
    if found.missing:
        lost = f"{', '.join(found.missing[:3])}{' and more' if len(found.missing) > 3 else ''}"
        return about.say(
            Fit.NOT, why=[f"it is not whole: {lost} is not there; take an earlier one"]
        )
    if damage:
        return about.say(Fit.NOT, why=[f"{each.code}: {each.what}; {each.fix}" for each in damage])
    differing = _differing(found.config, config)
    if differing:
        return about.say(Fit.NOT, why=differing)
    if engine in _READS.get(found.kind, ()):
        if found.kind == "deepspeed":
            return _for_deepspeed(about)
        if found.kind == "megatron":
            return _for_megatron(about)
        if found.holds_optimizer:
            why = ["any number of ranks reads it; ranks beyond its own have new random numbers"]
            return about.say(Fit.COMPATIBLE, keeps=_ALL, why=why)
    return _as_weights(about)


@dataclass(frozen=True, slots=True)
class _About:
    found: ForeignCheckpoint
    engine: str
    layout: Layout
    job: str

    def say(
        self, fit: Fit, *, keeps: str = "", why: Sequence[str] = (), commands: Sequence[str] = ()
    ) -> Verdict:
        found = self.found
        ranks = counted(self.layout.num_ranks, "rank")
        return Verdict(
            fit=fit,
            checkpoint=str(found.path),
            wrote=found.wrote,
            wants=f"{self.engine}, {ranks}: {_degrees(self.layout)}",
            keeps=keeps,
            why=tuple(why),
            commands=tuple(commands),
        )


def _for_deepspeed(about: _About) -> Verdict:
    """ZeRO's files are as many as ranks wrote them. Source: DeepSpeed's tutorial "Universal
    Checkpointing", and deepspeed/checkpoint/ds_to_universal.py."""
    found, layout = about.found, about.layout
    if found.form == "universal":
        why = ['it is universal: set "checkpoint": {"load_universal": true} in DeepSpeed\'s config']
        return about.say(Fit.COMPATIBLE, keeps=_ALL, why=why)
    wanted = {"data": layout.data, "tensor": layout.tensor}
    if "model" in found.degrees:
        wanted = {"data": layout.data, "model": layout.tensor * layout.pipeline}
    changed = [
        f"{name} was {size} and becomes {wanted[name]}"
        for name, size in sorted(found.degrees.items())
        if wanted[name] != size
    ]
    if not changed:
        return about.say(Fit.COMPATIBLE, keeps=_ALL, why=["as many ranks read it as wrote it"])
    if found.form == "no ZeRO" and wanted.get("tensor") == found.degrees.get("tensor"):
        return about.say(
            Fit.COMPATIBLE, keeps=_ALL, why=["without ZeRO every rank reads all of it"]
        )
    return about.say(
        Fit.CONVERTIBLE,
        keeps=_ALL,
        why=[
            f"{'; '.join(changed)}: its files are for as many ranks as wrote them",
            'then set "checkpoint": {"load_universal": true} in DeepSpeed\'s config',
        ],
        commands=[_to_universal(found, f"{found.path}_universal")],
    )


def _for_megatron(about: _About) -> Verdict:
    """A legacy checkpoint has one folder for each tensor and pipeline rank; the distributed one is
    read in any, but its optimizer only if it was saved for that. Source: Megatron-LM,
    megatron/training/checkpointing.py and docs of dist_checkpointing."""
    found, layout = about.found, about.layout
    wanted = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    changed = [
        f"{name} was {size} and becomes {wanted[name]}"
        for name, size in sorted(found.degrees.items())
        if wanted[name] != size
    ]
    if found.form == "legacy" and changed:
        target = f"{found.root}-tp{layout.tensor}-pp{layout.pipeline}"
        return about.say(
            Fit.CONVERTIBLE,
            keeps=_WEIGHTS,
            why=[f"{'; '.join(changed)}: there is one folder for each of its ranks"],
            commands=[
                _line(
                    *("python", "tools/checkpoint/convert.py", "--model-type", "GPT"),
                    *("--loader", "core", "--saver", "core"),
                    *("--load-dir", str(found.root), "--save-dir", target),
                    *("--target-tensor-parallel-size", str(layout.tensor)),
                    *("--target-pipeline-parallel-size", str(layout.pipeline)),
                )
                + "  # in Megatron-LM's folder"
            ],
        )
    if found.form == "legacy":
        why = ["as many tensor and pipeline ranks read it as wrote it"]
        return about.say(Fit.COMPATIBLE, keeps=_ALL, why=why)
    if changed and found.optimizer_form == "dp_reshardable":
        why = [
            (
                f"{'; '.join(changed)}: its optimizer is for other numbers of data ranks only "
                "(dp_reshardable)"
            ),
            (
                "the weights are read in any layout, with --no-load-optim; to keep the optimizer, "
                "save once more in the old layout with --dist-ckpt-optim-fully-reshardable"
            ),
        ]
        return about.say(Fit.CONVERTIBLE, keeps=_WEIGHTS, why=why)
    if found.degrees or found.optimizer_form is not None:
        said = "its tensors are read in any layout"
    else:
        said = (
            "its weights are read in any layout; its optimizer by other tensor or pipeline degrees "
            "only if it was saved with --dist-ckpt-optim-fully-reshardable, which it does not say"
        )
    return about.say(Fit.COMPATIBLE, keeps=_ALL, why=[said])


def _as_weights(about: _About) -> Verdict:
    """Another program's training state is of no use; its weights may be."""
    found, engine = about.found, about.engine
    why = [f"{engine} does not read {NAMES[found.kind]} as a training state"]
    if found.kind == "weights":
        why = ["weights are no training state: there is no optimizer and no step"]
    if engine != "paceline":
        if found.kind in ("weights", "trainer") and found.config is not None:
            why.append(f"to begin with them, your program has from_pretrained({str(found.path)!r})")
        return about.say(Fit.NOT, why=why)
    form, path = found.source
    if found.kind == "adapter":
        why = ["an adapter alone is no model: name it in the job, train.adapter.start"]
        return about.say(Fit.NOT, why=why)
    if form is None:
        return about.say(Fit.NOT, why=[*why, "no file of weights is in it that convert reads"])
    if found.kind == "deepspeed" and _is_cut(found):
        source = f"{found.path}_universal"
        commands = [_to_universal(found, source)]
    else:
        source, commands = str(path), []
    commands += [
        _line("paceline", "checkpoint", "convert", source, _START),
        _line("paceline", "run", about.job, "--from", f"{_START}/step-00000000"),
    ]
    return about.say(Fit.CONVERTIBLE, keeps=_WEIGHTS, why=why, commands=commands)


def _is_cut(found: ForeignCheckpoint) -> bool:
    """Whether DeepSpeed's tensor or pipeline ranks have parts that only it can join."""
    return found.form != "universal" and (
        "model" in found.degrees or found.degrees.get("tensor", 1) > 1
    )


def _to_universal(found: ForeignCheckpoint, target: str) -> str:
    module = ("python", "-m", "deepspeed.checkpoint.ds_to_universal")
    return _line(*module, "--input_folder", str(found.path), "--output_folder", target)


def _differing(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> list[str]:
    if theirs is None or ours is None:
        return []
    return [
        f"{name} is {theirs[name]} there and {ours[name]} in the job"
        for name in _SIZES
        if name in theirs and name in ours and theirs[name] != ours[name]
    ]


def _degrees(layout: Layout) -> str:
    sizes = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _line(*words: str) -> str:
    return shlex.join(words)
