"""Convert a checkpoint in a helper process, as torch is imported in `runtime/` alone."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, JobError, PacelineError, Problem, RunError
from paceline.job import Job
from paceline.job.adapters import alpha_of
from paceline.job.packages import need_package
from paceline.job.pretrained import files_beside, find_pretrained, loads_weights
from paceline.launch.helper import NoAnswer, ask
from paceline.profile.resolve import written_config
from paceline.record.checkpoints import read_manifest, verify_checkpoint
from paceline.record.conversion import AdapterFacts, Conversion, Converted, Form
from paceline.record.run import open_run

_NEEDS: Mapping[Form, tuple[str, ...]] = {
    "paceline": (),
    "safetensors": ("safetensors",),
    "torch": (),
    "gguf": ("transformers", "gguf"),
}
"""Packages that read or write a form, besides torch."""


def convert(asked: Conversion) -> Converted:
    """What was written, proved to be the same.

    Raises:
        JobError: `R010`, a package is missing.
        CheckpointError: `C012`, it cannot be read or written; `C013`, it is not the same.
        RunError: `C012`, its process failed.
    """
    need_packages(asked.source_form, asked.form)
    try:
        done = ask("checkpoint.export", asked, Converted)
    except NoAnswer as error:
        what = f"could not be converted: the process {error}"
        raise RunError(_problem(asked, "C012", what)) from None
    if done.problem is not None:
        raise CheckpointError(done.problem)
    if done.before != done.after:
        what = f"reads back as another state: digest {done.before[:12]} became {done.after[:12]}"
        raise CheckpointError(_problem(asked, "C013", what))
    return done


def need_packages(*forms: Form) -> None:
    """See that what reads and writes these forms is installed.

    Raises:
        JobError: `R010`.
    """
    for package in dict.fromkeys(("torch", *(name for form in forms for name in _NEEDS[form]))):
        need_package(package, f"converting needs {package}")


def verified_facts(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """The step of a checkpoint folder, and what its manifest has for one that is written anew.

    Raises:
        CheckpointError: A byte of it is not as it was written.
    """
    manifest = read_manifest(checkpoint)
    problem = manifest if isinstance(manifest, Problem) else verify_checkpoint(checkpoint)
    if problem is not None or isinstance(manifest, Problem):
        raise CheckpointError(*([problem] if problem is not None else []))
    names = ("layout", "seed", "samples", "job_digest", "held_out_loss", "state_digest")
    facts = {name: getattr(manifest, name) for name in names}
    facts |= {"mesh": dict(manifest.mesh)}
    if manifest.loss_scaler is not None:
        facts["loss_scaler"] = dict(manifest.loss_scaler)
    return manifest.step, facts


def with_known_config(asked: Conversion) -> Conversion:
    """With the model's config.json: the source's own, or that of the run it lies in."""
    source = Path(asked.source)
    own = (source if source.is_dir() else source.parent) / "config.json"
    if asked.source_form == "gguf":
        return asked  # the file itself has it
    if asked.source_form != "paceline" and own.is_file():
        config: dict[str, Any] = json.loads(own.read_text(encoding="utf-8"))
        return replace(asked, config=config, beside=files_beside(own.parent))
    try:
        job = open_run(source.parent.parent).job()
        known = written_config(job)
        pretrained = find_pretrained(job)
    except PacelineError:
        if asked.merge:
            raise
        return asked  # no run around it: a model nobody described
    adapters = _adapters(job, known)
    if asked.merge and (adapters is None or not adapters.weights):
        lacks = "adapters" if adapters is None else "model.pretrained"
        raise JobError.of(
            code="C012",
            what=f"the run has no {lacks}, so there is nothing to merge",
            where="--merge",
            fix="leave --merge out",
        )
    beside = files_beside(pretrained.folder) if pretrained is not None else ()
    return replace(asked, config=known, beside=beside, adapters=adapters)


def _adapters(job: Job, config: Mapping[str, Any] | None) -> AdapterFacts | None:
    spec = job.spec.train.adapter
    if spec is None or job.spec.program is not None or config is None:
        return None
    found = find_pretrained(job) if loads_weights(job) else None
    return AdapterFacts(
        rank=spec.rank,
        alpha=alpha_of(spec),
        dropout=spec.dropout,
        rslora=spec.scaling == "rslora",
        model_type=str(config["model_type"]),
        base=None if found is None else found.name,
        weights=() if found is None else tuple(map(str, found.weights)),
        quantised=spec.kind == "qlora",
    )


def _problem(asked: Conversion, code: str, what: str) -> Problem:
    return Problem(
        code=code,
        what=f"{Path(asked.source).name} {what}",
        where=asked.out,
        fix="do not use what was written; run it again with --json and report what it prints",
    )
