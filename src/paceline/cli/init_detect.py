"""What `paceline init` finds in a folder: a model, data, a training script; and the job for it.

Leaves out folders deeper than three levels, hidden ones, and those of environments and runs.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from paceline.errors import JobError, PacelineError
from paceline.job.hf_config import read_hf_config
from paceline.record.source_files import PASSED_OVER

_DEPTH = 3
_PASSED_OVER = {"runs", *PASSED_OVER}
_ROWS = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv")
_NO_CORPUS = ("requirements", "constraints", "license", "readme", "cmakelists", "notice")
"""Beginnings of names of text files that no one trains on."""

_MOST_LABEL_ROWS = 10_000
"""Rows that are read for the names of classes. A guess: a second of reading."""


@dataclass(kw_only=True)
class Found:
    """What a folder holds. Paths are relative to it."""

    models: list[str] = field(default_factory=list)
    """Folders with a `config.json` and safetensors files, and GGUF files; the nearest first."""

    broken: dict[str, str] = field(default_factory=dict)
    """Folders with a `config.json` and safetensors files that are no models, and why."""

    most_tokens: int | None = None
    """Positions that the first model knows, where its `config.json` has them."""

    tokenizers: list[str] = field(default_factory=list)
    """Folders with a `tokenizer.json` and no weights."""

    data: str | None = None
    """The file, or the folder of the files, with most bytes of one form."""

    data_files: int = 0
    has_rows: bool = False
    """Whether the data are rows, which need a tokenizer; text can be read as bytes."""

    kind: str = "text"
    """Kind of the rows, as `data.kind` names it."""

    labels: list[str] = field(default_factory=list)
    scripts: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Script that trains -> what trains it: `transformers`, `pytorch`."""

    gpus: list[str] = field(default_factory=list)

    @property
    def tokenizer(self) -> str:
        """A tokenizer for a model without trained weights."""
        return self.tokenizers[0] if self.tokenizers else "path/to/folder"

    @property
    def to_set(self) -> list[str]:
        """Fields of the job that only a person can fill in."""
        if self.is_script_alone:
            return []
        lacks_tokenizer = self.has_rows and not self.models and not self.tokenizers
        lacking = {"data.path": self.data is None, "model.tokenizer": lacks_tokenizer}
        lacking["data.labels"] = self.kind == "classification" and not self.labels
        return [name for name, is_lacking in lacking.items() if is_lacking]

    @property
    def is_script_alone(self) -> bool:
        """Whether the job can only start a script of one's own."""
        return bool(self.scripts) and not self.models and self.data is None


def look_around(folder: Path) -> Found:
    """What there is to train with in a folder, and the GPUs of this machine."""
    from paceline.topology.machine import find_local_machine

    found = Found(gpus=[gpu.name for gpu in find_local_machine().gpus])
    sizes: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for place, names in _walk(folder):
        if _is_model(folder / place, names):
            try:
                config = read_hf_config(folder / place / "config.json", where=place, fix="")
                if "model_type" not in config.values:
                    raise JobError.of(code="M002", what="it names no model_type", where="", fix="")
            except JobError as error:
                found.broken[place] = error.problems[0].what
            else:
                if not found.models:
                    found.most_tokens = config.values.get("max_position_embeddings")
                found.models.append(place)
            continue
        if "tokenizer.json" in names:
            found.tokenizers.append(place)
        gguf = (name for name in names if name.endswith(".gguf"))
        found.models += [_join(place, n) for n in gguf if _is_readable(folder / place / n)]
        for name in names:
            form = Path(name).suffix.lower()
            is_text = form == ".txt" and not name.lower().startswith(_NO_CORPUS)
            if (form in _ROWS or is_text) and _is_readable(folder / place / name):
                size = (folder / place / name).stat().st_size
                top = place.split(os.sep)[0]
                sizes.setdefault((top, form), []).append((size, _join(place, name)))
    if sizes:
        (top, form), files = max(sizes.items(), key=lambda each: sum(size for size, _ in each[1]))
        alone = len(files) == 1 or top == "."
        found.data = max(files)[1] if alone else top
        found.data_files = 1 if alone else len(files)
        found.has_rows = form in _ROWS
        _look_at_rows(found, folder)
    found.scripts = dict(_scripts(folder))
    return found


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for place, folders, names in os.walk(folder):
        relative = os.path.relpath(place, folder)
        depth = 0 if relative == "." else relative.count(os.sep) + 1
        folders[:] = sorted(
            name
            for name in folders
            if depth < _DEPTH and not name.startswith(".") and name not in _PASSED_OVER
        )
        yield relative, sorted(names)


def _is_readable(path: Path) -> bool:
    """No pipe, no link to nothing, and open to this user."""
    return path.is_file() and os.access(path, os.R_OK)


def _join(place: str, name: str) -> str:
    return name if place == "." else os.path.join(place, name)


def _is_model(folder: Path, names: list[str]) -> bool:
    has_weights = any(name.endswith(".safetensors") for name in names)
    return "config.json" in names and has_weights and _is_readable(folder / "config.json")


def _look_at_rows(found: Found, folder: Path) -> None:
    """Fill in what the rows are; a file that cannot be read is text until `plan` refuses it."""
    from paceline.job.sources import Source, by_split, find_files
    from paceline.prepare.columns import guess_kind, labels_of

    assert found.data is not None
    path = str(folder / found.data)
    try:
        files, _ = by_split(find_files([path])[0], [path])
        source = Source(name="data", weight=None, files=tuple(files), columns={}, where=found.data)
        found.kind = guess_kind(source)
        if found.kind == "classification":
            found.labels = labels_of(source, most=_MOST_LABEL_ROWS)
    except (PacelineError, OSError):
        found.kind = "text"


def _scripts(folder: Path) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Programs in the folder itself that train; others are theirs to start."""
    from paceline.adapt.result import Target
    from paceline.adapt.scan import scan_files

    files = filter(_is_readable, sorted(folder.glob("*.py")))
    sources = {path.name: path.read_bytes() for path in files}
    for file in scan_files(sources, nullcontext).files:
        if file.parts.trains:
            owner = file.parts.owner or file.parts.framework or "python"
            yield file.path, (owner, not file.adapt[Target.DDP].refused)


def job_for(found: Found, template: str) -> str:
    """The job file for what was found: the template with its sections replaced.

    Args:
        found: What there is.
        template: The job file for a folder with nothing in it, a paragraph for each section.
    """
    if found.is_script_alone:
        return _script_job(found)
    sections = {each.split(":")[0]: each for each in template.split("\n\n")}
    if found.models:
        sections["model"] = f"model:\n  pretrained: {_quoted(found.models[0])}"
        sections["train"] = _TUNED
    elif found.has_rows:
        sections["model"] += f"\n  tokenizer: {_quoted(found.tokenizer)}    # rows need one"
    if found.data is not None:
        sections["data"] = "\n".join(_data(found))
    if found.gpus:
        sections["cluster"] = (
            "cluster:\n"
            f"  accelerator: auto             # {len(found.gpus)} x {found.gpus[0]}, found here\n"
            "  # nodes: 2                    # more machines: paceline explain places"
        )
    return "\n\n".join(sections.values())


def _data(found: Found) -> Iterator[str]:
    yield "data:"
    yield f"  path: {_quoted(found.data or '')}"
    if found.kind != "text":
        yield f"  kind: {found.kind}"
    if found.labels:
        yield f"  labels: {_quoted(found.labels)}"
    most = found.most_tokens if isinstance(found.most_tokens, int) else 512
    seq_len = min(512, most) if found.models else 128
    yield f"  seq_len: {seq_len:<23}# tokens in one sample"
    if found.kind in ("chat", "completion"):
        yield "  too_long: drop                # what is longer than a sample; or cut, refuse"
    yield "  held_out: 0.05                # share kept for evaluation"


_TUNED = """\
train:
  global_batch: 16              # samples in one step, over all ranks
  steps: 100                    # or `epochs`, or `tokens`
  learning_rate: 0.0002         # as QLoRA trains adapters; take a tenth without an adapter
  warmup_steps: 10
  adapter: {kind: lora, rank: 16, targets: all}   # delete this line to train every weight"""
"""Training of a pretrained model. The rate: Dettmers et al. 2023, QLoRA, table 9."""


def _script_job(found: Found) -> str:
    script = next(iter(found.scripts))
    return f"""\
# A Paceline job: start your own script, watch it, start it again after a failure.
#   paceline run FILE     start it; its output, steps and losses are shown
# Every field: paceline explain own-script
name: {_quoted(re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem).strip("-._") or "job")}
command: [python, {_quoted(script)}]     # arguments follow: --lr, "0.1"
processes: {max(1, len(found.gpus))}                    # each gets RANK and WORLD_SIZE

recovery:
  max_restarts: 3               # restarts without progress before Paceline gives up
  silence: auto                 # how long it may print nothing: 30m, or off
"""


def _quoted(value: str | list[str]) -> str:
    """In one line, as YAML reads it, also inside of brackets."""
    shown = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=math.inf)
    return str(shown).strip()[1:-1]


def found_lines(found: Found, folder: Path) -> Iterator[str]:
    """What was found and what was chosen for it, a line each."""
    if found.models:
        more = f"; also {', '.join(found.models[1:])}" if len(found.models) > 1 else ""
        yield f"model       {found.models[0]}, used as model.pretrained, trained with LoRA{more}"
    for model, why in found.broken.items():
        yield f"left out    {model}: {why}"
    if found.tokenizers and found.has_rows and not found.models:
        yield f"tokenizer   {found.tokenizer}, used as model.tokenizer"
    if found.data is not None:
        size = f"{found.data_files} files, " if found.data_files > 1 else ""
        yield f"data        {found.data}, used as data.path ({size}{found.kind})"
    for number, (name, (owner, is_adaptable)) in enumerate(found.scripts.items()):
        script = shlex.quote(name)
        in_job = found.is_script_alone and number == 0
        how = "started by job.yaml" if in_job else f"paceline run --script {script}"
        yield f"script      {name} trains with {owner}: {how}"
        if is_adaptable:
            yield f"            for one device; for many: paceline adapt {script} --to ddp"
    if found.gpus:
        yield f"machine     {len(found.gpus)} x {found.gpus[0]}: cluster.accelerator auto"
    elif found.models or found.data is not None:
        yield "machine     no GPU: two ranks on its CPUs"
    if not (found.models or found.data or found.scripts):
        place = "this folder" if folder == Path() else folder
        yield f"found       no model, data or script in {place}; job.yaml has example values"
