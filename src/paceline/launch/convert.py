"""Convert a checkpoint in a helper process, as torch is imported in `runtime/` alone."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, JobError, PacelineError, Problem, RunError
from paceline.job import Job
from paceline.job.adapters import CONFIG, NOT_READ, alpha_of
from paceline.job.hf_config import read_hf_config
from paceline.job.packages import need_package
from paceline.job.pretrained import (
    files_beside,
    find_pretrained,
    folder_of,
    loads_weights,
    weight_files,
)
from paceline.launch.external_checkpoints import damage_in, find_other, no_weights
from paceline.launch.helper import NoAnswer, ask
from paceline.profile.resolve import written_config
from paceline.record.checkpoints import read_manifest, verify_checkpoint
from paceline.record.conversion import AdapterFacts, Conversion, Converted, Form
from paceline.record.find_checkpoints import one_checkpoint_at
from paceline.record.run import open_run

_NEEDS: Mapping[Form, tuple[str, ...]] = {
    "paceline": (),
    "safetensors": ("safetensors",),
    "torch": (),
    "gguf": ("transformers", "gguf"),
    "adapter": ("safetensors",),
    "dcp": (),
    "deepspeed": (),
    "megatron": (),
}
"""Packages that read or write a form, besides torch."""


def convert(asked: Conversion) -> Converted:
    """What was written, proved to be the same. OUT gets its name when that is so, and is not there
    otherwise.

    Raises:
        JobError: `R010`, a package is missing.
        CheckpointError: `C012`, it cannot be read or written; `C013`, it is not the same.
        RunError: `C012`, its process failed.
    """
    need_packages(asked.source_form, asked.form)
    with unfinished(Path(asked.out)) as out:
        try:
            done = ask("checkpoint.export", replace(asked, out=str(out)), Converted)
        except NoAnswer as error:
            what = f"could not be converted: the process {error}"
            raise RunError(_problem(asked, "C012", what)) from None
        if done.problem is not None:
            raise CheckpointError(done.problem)
        if done.before != done.after:
            what = (
                f"reads back as another state: digest {done.before[:12]} became {done.after[:12]}"
            )
            raise CheckpointError(_problem(asked, "C013", what))
    files = tuple(each.replace(str(out), asked.out, 1) for each in done.files)
    return replace(done, files=files)


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """A path beside another for what is being written: it becomes the other when all is well, and
    is removed otherwise."""
    path = out.resolve().with_name(f".{out.name}.unfinished")
    try:
        _remove(path)  # of a command that was killed
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        path.replace(out)  # an empty folder may be there
    except OSError as error:
        raise JobError.of(
            code="R002",
            what=f"{out} cannot be written: {error.strerror or error}",
            where="OUT",
            fix="give a path that you may write to, on a disk with room",
        ) from None
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)


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
    names = ("layout", "seed", "samples", "job_digest", "held_out_loss", "state_digest", "batches")
    facts = {name: getattr(manifest, name) for name in names}
    facts |= {"mesh": dict(manifest.mesh)}
    if manifest.loss_scaler is not None:
        facts["loss_scaler"] = dict(manifest.loss_scaler)
    return manifest.step, facts


def find_source(path: Path, named: Form | None = None) -> tuple[Form, Path, bool]:
    """The form of what is to be converted, where it is, and whether the folder also has optimizer
    state in files that no reader takes.

    Args:
        named: What somebody says it is; None looks.

    Raises:
        JobError: `C011`, there is no checkpoint.
        CheckpointError: `M012`, it has no weights, or files are missing or damaged; `C012`, it is
            not what it is said to be.
    """
    if "gguf" in (named, path.suffix.removeprefix(".")):
        return "gguf", path, False
    found = find_other(path)
    if found is None and named in (None, "paceline"):
        return "paceline", one_checkpoint_at(path), False
    if found is None or named not in (None, found.source[0]):
        raise CheckpointError.of(
            code="C012",
            what=f"{path} is not what --from {named} reads"
            + (f": it is {found.wrote}" if found is not None else ""),
            where="--from",
            fix="leave --from out: the format is read from the files",
        )
    if damage := damage_in(found):
        raise CheckpointError(*damage)
    form, source = found.source
    if form is None:
        raise CheckpointError(no_weights(found))
    return form, source, found.optimizer_elsewhere


def with_known_config(asked: Conversion) -> Conversion:
    """With the model's config.json: the source's own, or that of the run it lies in."""
    source = Path(asked.source)
    folders = [source if source.is_dir() else source.parent]
    if asked.source_form in ("deepspeed", "dcp"):  # a Trainer's or Accelerate's has them inside
        folders.append(source.parent)
    own = next((each for each in folders if (each / "config.json").is_file()), folders[0])
    own /= "config.json"
    if asked.source_form == "gguf":
        return asked  # the file itself has it
    if asked.source_form != "paceline" and own.is_file():
        return replace(asked, config=_fields_of(own), beside=files_beside(own.parent))
    if asked.source_form == "adapter":
        return _with_base(asked, source)
    if asked.source_form != "paceline":
        return asked
    try:
        run = open_run(source.parent.parent)
        job = run.job()
        known = written_config(job)
        pretrained = find_pretrained(job)
    except PacelineError:
        if asked.merge:
            raise
        return asked  # no run around it: a model nobody described
    adapters = _adapters(job, known, run.path)
    if asked.merge and (adapters is None or (adapters.quantised and adapters.run)):
        what, fix = "the run has no adapters, so there is nothing to merge", "leave --merge out"
        if adapters is not None:
            what = "the adapters were trained beside random weights in 4 bits, which no file has"
            fix = "train with train.adapter.kind lora, or beside the weights of model.pretrained"
        raise JobError.of(code="C012", what=what, where="--merge", fix=fix)
    beside = files_beside(pretrained.folder) if pretrained is not None else ()
    return replace(asked, config=known, beside=beside, adapters=adapters)


def _adapters(job: Job, config: Mapping[str, Any] | None, run: Path) -> AdapterFacts | None:
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
        run=str(run.resolve()) if found is None else "",
        quantised=spec.kind == "qlora",
    )


def _with_base(asked: Conversion, adapter: Path) -> Conversion:
    """What peft's own folder needs: its settings beside it, or its base to merge it into."""
    settings = adapter / CONFIG
    if not asked.merge:
        return replace(asked, beside=(str(settings), *files_beside(adapter)))
    config = _fields_of(settings)
    named = str(config.get("base_model_name_or_path") or "")
    base = folder_of(named, adapter)
    unlike = [name for name in NOT_READ if config.get(name)]
    if base is None or unlike or config.get("peft_type") != "LORA":
        why = f"its base {named or '(unnamed)'} is not on this machine"
        if base is not None:
            why = f"its adapter_config.json sets {', '.join(unlike) or config.get('peft_type')}"
        raise JobError.of(
            code="C012",
            what=f"{adapter} cannot be merged here: {why}",
            where="--merge",
            fix="merge it with peft: PeftModel.from_pretrained(base, PATH).merge_and_unload()",
        )
    known = _fields_of(base / "config.json")
    facts = AdapterFacts(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=0.0,
        rslora=bool(config.get("use_rslora")),
        model_type=str(known["model_type"]),
        base=named,
        weights=tuple(map(str, weight_files(base, "--merge"))),
    )
    return replace(asked, config=known, beside=files_beside(base), adapters=facts)


def _fields_of(file: Path) -> dict[str, Any]:
    """A config.json, or an adapter's settings.

    Raises:
        JobError: `M002`: it cannot be read, or is not a JSON object.
    """
    return dict(read_hf_config(file, where=str(file.parent), fix="copy the file again").values)


def _problem(asked: Conversion, code: str, what: str) -> Problem:
    return Problem(
        code=code,
        what=f"{Path(asked.source).name} {what}",
        where=asked.out,
        fix="do not use what was written; run it again with --json and report what it prints",
    )
