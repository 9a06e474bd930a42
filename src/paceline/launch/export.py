"""Export a run: a folder that transformers or peft loads, compared with the run's own model.

The folder is written under another name beside its own, and gets its name when it is whole.

Leaves out: the text of the model card (`report/model_card.py`).
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, get_args

from paceline.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.job.data_rules import is_prepared
from paceline.job.pretrained import Pretrained, find_pretrained, loads_weights
from paceline.job.sources import find_tokenizer
from paceline.launch.convert import convert, unfinished, verified_facts, with_known_config
from paceline.launch.external_checkpoints import find_other
from paceline.launch.helper import NoAnswer, ask
from paceline.launch.inspect_external import look
from paceline.prepare import find_prepared
from paceline.prepare.turns import end_of_turn
from paceline.profile.resolve import resolve_profile
from paceline.record.conversion import Comparison, Conversion, Converted, DType, LogitsCheck
from paceline.record.run import RunFolder
from paceline.record.tensors import TensorRecord, read_tensors
from paceline.render.serve import ADAPTER, check_servable, serve_files
from paceline.topology.machine import find_local_machine
from paceline.units import bytes_apart, format_bytes

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CARD = "README.md"
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MODEL = "model/"
_BESIDE_BYTES = 64 << 20
"""Room for the tokenizer and other small files. A guess."""

_MEMORY = 1.3
"""Memory of a comparison over that of the weights in float32. A guess."""

_TOLERANCE, _TOLERANCE_MERGED = 1e-3, 0.1
"""Largest difference that passes, as a share of the largest logit: sums in another order, and
adapters that were merged into 16 bits. Guesses, far below what a wrong tensor gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One export that can be made."""

    run: RunFolder
    job: Job
    out: Path
    conversion: Conversion
    pretrained: Pretrained | None

    endpoint: bool = False
    """Whether the folder gets a program that answers HTTP requests (`render/serve.py`)."""

    @property
    def kind(self) -> str:
        """`model`, `adapters`, or `merged`."""
        if self.conversion.adapters is None:
            return "model"
        return "merged" if self.conversion.merge else "adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and how it compares."""

    folder: Path
    kind: str
    step: int
    dtype: str
    """Type of the exported weights; empty where it is the checkpoint's."""

    converted: Converted
    check: LogitsCheck
    licence: str | None = None
    """Licence that the starting weights' model card names; None without one."""


def plan_export(
    run: RunFolder,
    checkpoint: Path,
    out: Path,
    *,
    merge: bool = False,
    dtype: DType | None = None,
    max_shard_bytes: int = 5 * 10**9,
    endpoint: bool = False,
) -> Export:
    """The export of a checkpoint, with every reason against it found before anything is written.

    Args:
        dtype: Type of the weights; None: that of the weights the run started from.
        max_shard_bytes: Of one file of weights.
        endpoint: Write the program that answers HTTP requests beside them.

    Raises:
        JobError: `C012`, the run's model is a program's own, or has nothing to merge, or adapters
            alone are no model for an endpoint; `R002`, the folder is there or has no room.
        CheckpointError: The checkpoint is damaged.
    """
    if run.script() is not None:
        raise _own_program(run, checkpoint, "the run's program is not Paceline's own trainer")
    job = run.job()
    if job.spec.program is not None or job.spec.model.factory is not None:
        named = job.spec.model.factory or job.spec.program
        raise _own_program(run, checkpoint, f"the model is made by {named}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError.of(
            code="R002",
            what=f"{out} is there already, and is not an empty folder",
            where="OUT",
            fix="give a new name; nothing is overwritten",
        )
    pretrained = find_pretrained(job)
    step, facts = verified_facts(checkpoint)
    conversion = with_known_config(
        Conversion(
            source=str(checkpoint.resolve()),
            out=str(out.resolve()),
            source_form="paceline",
            form="safetensors",
            max_shard_bytes=max_shard_bytes,
            step=step,
            merge=merge,
            facts=facts,
        )
    )
    pretrained = pretrained if loads_weights(job) else None
    if dtype is None and conversion.adapters is None and pretrained is not None:
        dtype = _type_of(pretrained)
    conversion = replace(conversion, dtype=dtype)
    export = Export(
        run=run, job=job, out=out, conversion=conversion, pretrained=pretrained, endpoint=endpoint
    )
    if endpoint and export.kind == "adapters":
        JobError.raise_for(
            check_servable({}, [ADAPTER], tokens_are_bytes=False, where=run.path.name)
        )
    _check_room(export)
    return export


def export(asked: Export, card: Callable[[Exported], str], *, check: bool = True) -> Exported:
    """Write the folder.

    Args:
        card: Text of the folder's README.md.

    Raises:
        CheckpointError: `C012`, it cannot be written; `C013`, it is not the run's model.
    """
    base = None if asked.pretrained is None else asked.pretrained.folder
    with unfinished(asked.out) as folder:
        done = convert(replace(asked.conversion, out=str(folder)))
        _write_tokenizer(asked.job, folder)
        _pad_classifier(folder)
        done = replace(done, notes=(*done.notes, *_end_at_turns(asked.job, folder)))
        if base is not None:
            _copy_licence(base, folder)
        found = LogitsCheck(not_made="it was not asked for (--no-check)")
        if check:
            found = _compare(asked, folder)
        if found.problem is not None:
            raise CheckpointError(found.problem)
        exported = Exported(
            folder=asked.out,
            kind=asked.kind,
            step=asked.conversion.step,
            dtype=asked.conversion.dtype or "",
            converted=done,
            check=found,
            licence=None if base is None else _licence_of(base),
        )
        (folder / CARD).write_text(card(exported), encoding="utf-8")
        if asked.endpoint:
            write_endpoint(folder, tokens_are_bytes=find_tokenizer(asked.job) is None, verify=False)
        names = sorted(path.name for path in folder.iterdir())
    files = tuple(str(asked.out / name) for name in names)
    return replace(exported, converted=replace(done, files=files))


def write_endpoint(
    folder: Path, *, tokens_are_bytes: bool = False, verify: bool = True
) -> tuple[Path, ...]:
    """Write a program that answers HTTP requests beside the weights of a Hugging Face folder.

    Args:
        folder: With config.json, weights in safetensors and a tokenizer.
        tokens_are_bytes: Whether the model was trained on bytes, without a tokenizer.
        verify: Read the weights and the tokenizer first, as `checkpoint verify` does.

    Raises:
        CheckpointError: They are damaged, or do not go together; nothing was written.
        JobError: `C012`, no endpoint can be made of the folder; `R002`, a file by the name of one
            of ours is there and is another, or the folder cannot be written.
    """
    try:
        names = {path.name for path in folder.iterdir()}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise _unwritable(folder, f"its config.json cannot be read: {error}") from None
    config = config if isinstance(config, dict) else {}
    JobError.raise_for(
        check_servable(config, names, tokens_are_bytes=tokens_are_bytes, where=folder.name)
    )
    files = serve_files(config, tokens_are_bytes=tokens_are_bytes)
    for name, text in files.items():
        if name in names and (folder / name).read_bytes() != text.encode():
            raise _unwritable(folder, f"it has another {name} already, which is not overwritten")
    new = [folder / name for name in files if name not in names]
    if verify and (found := find_other(folder)) and (wrong := look(found, scan=True).problems):
        raise CheckpointError(*wrong)
    try:
        for path in new:
            path.write_text(files[path.name], encoding="utf-8")
    except OSError as error:
        for path in new:
            path.unlink(missing_ok=True)
        raise _unwritable(folder, error.strerror or str(error)) from None
    return tuple(folder / name for name in files)


def _unwritable(folder: Path, why: str) -> JobError:
    return JobError.of(
        code="R002",
        what=f"the endpoint cannot be written into {folder}: {why}",
        where="--for fastapi",
        fix="give a folder that you may write to and that has none of serve.py, model.py and "
        "requirements.txt",
    )


def _own_program(run: RunFolder, checkpoint: Path, why: str) -> JobError:
    return JobError.of(
        code="C012",
        what=f"{run.path.name} cannot be exported: {why}, so there is no config.json for it",
        where=str(run.path),
        fix="take its state_dict: "
        f"`paceline checkpoint convert {checkpoint} weights.pt --to torch`",
    )


def _type_of(pretrained: Pretrained) -> DType | None:
    for key in ("dtype", "torch_dtype"):
        named = pretrained.config.get(key)
        for each in get_args(DType):
            if named == each:
                return each  # type: ignore[no-any-return]
    return None


def _check_room(asked: Export) -> None:
    """
    Raises:
        JobError: `R002`, the disk has too little room.
    """
    needed = _bytes_of(asked, asked.conversion.dtype) + _BESIDE_BYTES
    place = asked.out.resolve().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        takes, has = bytes_apart(needed, free)
        raise JobError.of(
            code="R002",
            what=f"the export takes {takes}, and {place} has {has} free",
            where="OUT",
            fix="make room, give a folder on another disk, or halve it with --dtype bfloat16",
        )


def _bytes_of(asked: Export, dtype: str | None) -> int:
    if asked.kind == "merged":
        if asked.pretrained is None:
            return resolve_profile(asked.job).num_parameters * _BYTES[dtype or "float32"]
        as_is = sum(path.stat().st_size for path in asked.pretrained.weights)
        width = _BYTES[_type_of(asked.pretrained) or "float32"]
        return as_is if dtype is None else as_is * _BYTES[dtype] // width
    table = read_tensors(Path(asked.conversion.source)) or {}
    return sum(
        _bytes_of_tensor(each, dtype) for name, each in table.items() if name.startswith(_MODEL)
    )


def _bytes_of_tensor(tensor: TensorRecord, dtype: str | None) -> int:
    width = _BYTES.get(dtype if dtype is not None and tensor.dtype in _BYTES else tensor.dtype, 8)
    return prod(tensor.size) * width


def _write_tokenizer(job: Job, folder: Path) -> None:
    """The tokenizer and the chat template that the job names in place of the model's own."""
    file = find_tokenizer(job) if job.spec.model.tokenizer != "auto" else None
    if file is not None:
        names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
        for each in (file, *(file.with_name(name) for name in names)):
            if each.is_file():
                shutil.copy(each, folder)
    template = job.spec.model.chat_template
    if template != "auto":
        shutil.copy(job.folder / template, folder / "chat_template.jinja")


def _pad_classifier(folder: Path) -> None:
    """Name the tokenizer's padding in a classifier's config, which takes no batch without it."""
    config, tokenizer = folder / "config.json", folder / "tokenizer.json"
    settings = folder / "tokenizer_config.json"
    if not (config.is_file() and tokenizer.is_file() and settings.is_file()):
        return
    known: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    is_classifier = "SequenceClassification" in str(known.get("architectures"))
    if not is_classifier or known.get("pad_token_id") is not None:
        return
    named = json.loads(settings.read_text(encoding="utf-8")).get("pad_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens", ())
    for token in added:
        if token["content"] == text:
            known["pad_token_id"] = token["id"]
            config.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _end_at_turns(job: Job, folder: Path) -> Iterator[str]:
    """Let generation end at the token that ends the answers of the data; a note where it is new."""
    told, config = folder / "generation_config.json", folder / "config.json"
    try:
        prepared = find_prepared(job) if is_prepared(job) else None
        token = None if prepared is None else end_of_turn(prepared)
    except JobError:  # the data are not there any more
        return
    if token is None or not config.is_file():  # adapters: the base model's settings are used
        return
    known: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    settings = {name: known[name] for name in _ENDS if known.get(name) is not None}
    if told.is_file():
        settings = json.loads(told.read_text(encoding="utf-8"))
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token in ends:
        return
    settings["eos_token_id"] = [*ends, token]
    told.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    yield f"generation also ends at token {token}, which ends the answers of the data"


def _compare(asked: Export, folder: Path) -> LogitsCheck:
    base, adapters = None, asked.conversion.adapters
    if adapters is not None and adapters.quantised:
        return LogitsCheck(
            not_made="the adapters were trained beside weights in NF4, and are loaded beside the "
            "whole ones, which compute something else"
        )
    if asked.kind == "adapters":
        if asked.pretrained is None:
            return LogitsCheck(
                not_made="the adapters were trained beside random weights, which no file has; "
                "--merge draws them again, and writes and compares a whole model"
            )
        base = str(asked.pretrained.folder)
    merges = asked.kind != "model"  # the base is loaded beside adapters too
    whole = replace(asked, conversion=replace(asked.conversion, merge=merges))
    needed = int(_bytes_of(whole, "float32") * _MEMORY)
    available = find_local_machine().available_bytes
    if available < needed:
        return LogitsCheck(
            not_made=f"it takes {format_bytes(needed)} of memory, and {format_bytes(available)} "
            "are available"
        )
    is_whole = asked.kind == "model"
    request = Comparison(
        run=str(asked.run.path),
        checkpoint=asked.conversion.source,
        folder=str(folder),
        base=base,
        dtype=asked.conversion.dtype if is_whole else None,
        tolerance=_TOLERANCE if asked.kind != "merged" else _TOLERANCE_MERGED,
    )
    try:
        return ask("checkpoint.logits", request, LogitsCheck)
    except NoAnswer as error:
        return LogitsCheck(not_made=f"its process {error}")


_LICENCE = re.compile(r"^license:\s*[\"']?([\w.+-]+)", re.M)


def _licence_of(folder: Path) -> str | None:
    """The licence that a model's card names, in the lines between its first two `---`."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    head = text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else ""
    found = _LICENCE.search(head)
    return None if found is None else found[1]


def _copy_licence(source: Path, folder: Path) -> None:
    for path in source.glob("LICEN[CS]E*"):
        if path.is_file():
            shutil.copy(path, folder)
