"""Look into checkpoints that other programs wrote, and check them: headers against files here,
without torch; what needs the values in a helper process.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from paceline.errors import JobError, PacelineError, Problem
from paceline.job.adapters import CONFIG, without_pair
from paceline.job.hf_config import read_hf_config
from paceline.job.packages import need_package
from paceline.job.pretrained import PICKLES, folder_of, tokenizer_in, weight_files
from paceline.job.prompts import Prompt
from paceline.job.safetensors import StoredTensor, stored_tensors
from paceline.launch.convert import need_packages
from paceline.launch.external_checkpoints import COPY_AGAIN, damage_in, no_weights, stored_in
from paceline.launch.helper import NoAnswer, ask
from paceline.profile.fitting import listed
from paceline.record.conversion import Form, HeldTensor, Look, Seen
from paceline.record.external_checkpoints import TORCH_FILES, ForeignCheckpoint
from paceline.record.outputs import Generation

_TRAIN_BYTES = 16
"""For each parameter: weight and gradient in 16 bits, and AdamW's float32 copy and two moments.
Source: ZeRO, arXiv:1910.02054, section 3.1."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""A header's names of types -> torch's; whole numbers are `I64`, `U8`: `int64`, `uint8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One checkpoint of another program, and what is known of it."""

    path: str
    wrote: str
    """Whose it is, its form, step and layout."""

    kind: str
    form: str
    step: int | None
    degrees: Mapping[str, int]
    model: str | None
    """By its config.json, or what the checkpoint itself tells."""

    tokenizer: bool
    base: str | None
    """What an adapter was trained beside."""

    optimizer: str = ""
    """What its optimizer state is, as far as it is read; empty where there is none."""

    num_params: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Type -> parameters."""

    num_bytes: int = 0
    """Memory of the weights as they are."""

    train_bytes: int = 0
    """Memory to train all of them with AdamW, without activations."""

    tensors: Sequence[HeldTensor] = ()
    notes: Sequence[str] = ()
    checked: Sequence[str] = ()
    skipped: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    warnings: Sequence[Problem] = ()
    """What is to be known of a checkpoint that is whole."""
    answer: str | None = None
    """What the model wrote after the prompt."""


def look(found: ForeignCheckpoint, *, key: str | None = None, scan: bool = False) -> Looked:
    """What a checkpoint holds.

    Args:
        key: Where in files of torch the weights are; None finds it.

    Raises:
        JobError: `R010`, a package is missing.
    """
    form, path = found.source
    config = found.config or {}
    base = config.get("base_model_name_or_path") if found.kind == "adapter" else None
    about = Looked(
        path=str(found.path),
        wrote=found.wrote,
        kind=found.kind,
        form=form or "",
        step=found.step,
        degrees=found.degrees,
        model=_model(config) if base is None else None,
        tokenizer=tokenizer_in(_folder(found)) is not None,
        base=base,
        optimizer="there is one; only its own program reads it"
        if found.optimizer_elsewhere
        else "",
        problems=damage_in(found),
        warnings=list(_lost_newest(found)),
    )
    if about.problems:
        return about
    if form is None:
        return replace(about, problems=[no_weights(found)])
    if not scan and (stored := stored_in(found)):
        return _counted(about, Seen(tensors=tuple(_held(each) for each in stored.values())))
    seen = _seen(found, form, path, key, scan)
    if not scan or (seen.problems and not seen.tensors):
        return _counted(about, seen)
    more = _more_checks(found, seen)
    return _counted(about, more)


def _seen(found: ForeignCheckpoint, form: Form, path: Path, key: str | None, scan: bool) -> Seen:
    need_packages(form)
    is_broken = found.kind != "adapter" and not found.config  # its config.json is M002 by itself
    has_settings = (_folder(found) / "config.json").exists()
    tokenizer = None if is_broken and has_settings else tokenizer_in(_folder(found))
    config = found.config if found.kind != "adapter" else None
    asked = Look(
        path=str(path),
        form=form,
        key=key,
        scan=scan,
        config=config,
        tokenizer=None if tokenizer is None else str(tokenizer),
        optimizers=tuple(str(each) for each in _beside(found) if _is_optimizer(each)),
    )
    try:
        return ask("checkpoint.inspect_external", asked, Seen)
    except NoAnswer as error:
        what = f"{found.path.name} could not be read: the process {error}"
        return Seen(problems=(Problem(code="M012", what=what, where=str(path), fix=COPY_AGAIN),))


def _beside(found: ForeignCheckpoint) -> list[Path]:
    """Files of torch that Trainer and Accelerate write beside the weights."""
    if found.kind not in ("trainer", "accelerate") or not found.path.is_dir():
        return []
    endings = (*TORCH_FILES, ".pkl")
    files = sorted(each for each in found.path.iterdir() if each.suffix in endings)
    return [each for each in files if not each.match(PICKLES)]


def _is_optimizer(file: Path) -> bool:
    return file.name.startswith("optimizer")


def infer(
    found: ForeignCheckpoint, looked: Looked, prompt: str, expect: str | None, *, tokens: int
) -> Looked:
    """With what the model writes after a prompt.

    Args:
        expect: What must be in the answer; None asks nothing of it.

    Raises:
        JobError: `R010`, a package is missing; `C012`, transformers cannot load such a folder.
    """
    whole = (found.config or {}).get("architectures") and looked.tokenizer
    if not (whole or found.kind == "adapter") or not found.path.is_dir():
        raise JobError.of(
            code="C012",
            what=f"{found.path} cannot answer a prompt: transformers needs a folder with "
            "config.json, weights and a tokenizer",
            where="--infer",
            fix=f"paceline checkpoint convert {found.path} OUT --to safetensors, and copy the "
            "model's config.json and tokenizer beside it",
        )
    for package in ("transformers", *(["peft"] if found.kind == "adapter" else [])):
        need_package(package, f"--infer needs {package}")
    base = None if looked.tokenizer else folder_of(looked.base or "", found.path)
    request = {
        "folder": str(found.path),
        "tokenizer": None if base is None else str(base),
        "prompts": (Prompt(text=prompt),),
        "num_tokens": tokens,
        "is_bytes": False,
    }
    try:
        (answer,) = ask("generate", request, tuple[Generation, ...])
    except NoAnswer as error:
        fix = "see that transformers loads the folder, and peft its base"
        return replace(looked, problems=[_answered(found, f"nothing: the process {error}", fix)])
    problems = []
    if expect is not None and expect not in answer.text:
        fix = "compare the weights, the tokenizer and the prompt with those that gave it"
        problems = [_answered(found, f"{answer.text!r}, which has no {expect!r} in it", fix)]
    return replace(looked, answer=answer.text, problems=problems)


def _answered(found: ForeignCheckpoint, what: str, fix: str) -> Problem:
    return Problem(code="C018", what=f"the model answers {what}", where=str(found.path), fix=fix)


def _held(each: StoredTensor) -> HeldTensor:
    number = each.dtype.replace("U", "uint").replace("I", "int")
    dtype = _DTYPES.get(each.dtype, number)
    return HeldTensor(name=each.name, dtype=dtype, shape=each.shape)


def _counted(about: Looked, seen: Seen) -> Looked:
    sizes: Counter[str] = Counter()
    for each in seen.tensors:
        sizes[each.dtype] += prod(each.shape)
    num = sum(sizes.values())
    return replace(
        about,
        model=about.model or _model(seen.config or {}) if about.base is None else None,
        num_params=num,
        dtypes=dict(sizes.most_common()),
        num_bytes=sum(size * _width(dtype) for dtype, size in sizes.items()),
        train_bytes=num * _TRAIN_BYTES,
        tensors=seen.tensors,
        optimizer=seen.optimizer or about.optimizer,
        notes=seen.notes,
        checked=seen.checked,
        skipped=seen.skipped,
        problems=[*about.problems, *seen.problems],
        warnings=[*about.warnings, *seen.warnings],
    )


def _width(dtype: str) -> int:
    digits = "".join(each for each in dtype.partition("_")[0].removeprefix("b") if each.isdigit())
    return int(digits or 8) // 8


def _model(config: Mapping[str, Any]) -> str | None:
    named = (config.get("architectures") or [None])[0] or config.get("model_type")
    return None if named is None else str(named)


def _more_checks(found: ForeignCheckpoint, seen: Seen) -> Seen:
    """With the checks that need no values: types and the base of an adapter."""
    checked, skipped, problems = list(seen.checked), list(seen.skipped), list(seen.problems)
    if stored_in(found):
        checked.insert(0, "headers and sizes of the safetensors files")
    settings = _folder(found) / (CONFIG if found.kind == "adapter" else "config.json")
    if not found.config and settings.exists():
        problems += _unreadable(settings)
    if found.kind == "adapter":
        problems += [*_against_rank(found, seen.tensors), *_without_pair(found, seen.tensors)]
        named = (found.config or {}).get("base_model_name_or_path")
        base = folder_of(str(named or ""), found.path)
        if base is None:
            why = f"{named} is not on this machine" if named else "its config names none"
            skipped.append(f"adapter against base: {why}")
        else:
            wrong = list(_against_base(found, seen.tensors, base))
            problems += wrong
            checked += [] if wrong else [f"every matrix goes with one of {base}"]
    elif found.config is None and seen.config is None and not settings.exists():
        skipped.append("names and shapes: there is no config.json beside it")
    if others := [each.name for each in _beside(found) if not _is_optimizer(each)]:
        skipped.append(f"{listed(others)}: only the program that wrote them reads them")
    if tokenizer_in(_folder(found)) is None:
        skipped.append("the tokenizer: there is none beside it")
    return replace(
        seen,
        checked=tuple(checked),
        skipped=tuple(skipped),
        problems=tuple(problems),
        warnings=(*seen.warnings, *_types(found, seen)),
    )


def _lost_newest(found: ForeignCheckpoint) -> Iterator[Problem]:
    """`M012`: the folder's newest step is not there, and an older one was looked at."""
    if names := found.lost_newest:
        yield Problem(
            code="M012",
            what=f"{names}, which is not there; {found.path.name} was looked at",
            where=str(found.root),
            fix="copy the step that is missing, or name one that is there in that file",
        )


def _unreadable(settings: Path) -> Sequence[Problem]:
    """`M002`, where a file of settings is there and holds none."""
    try:
        read_hf_config(settings, where=str(settings.parent), fix="copy the file again")
    except JobError as error:
        return error.problems
    return ()


def _folder(found: ForeignCheckpoint) -> Path:
    return found.path if found.path.is_dir() else found.path.parent


def _types(found: ForeignCheckpoint, seen: Seen) -> Iterator[Problem]:
    """`C019`: most of the weights are of another type than config.json says."""
    if found.kind not in ("weights", "trainer"):
        return  # of ZeRO the float32 weights are read, whatever the model is trained in
    told = (found.config or {}).get("dtype") or (found.config or {}).get("torch_dtype")
    sizes: Counter[str] = Counter()
    for each in seen.tensors:
        if "float" in each.dtype:
            sizes[each.dtype] += prod(each.shape)
    most = max(sizes, key=sizes.__getitem__, default=told)
    if told is not None and told != most:
        yield Problem(
            code="C019",
            what=f"config.json says {told}, and most of the weights are {most}: transformers 5 "
            f"loads them as {told}",
            where=str(found.path / "config.json"),
            fix=f"write dtype: {most} into config.json, or save the weights as {told}",
        )


def _against_rank(found: ForeignCheckpoint, tensors: Sequence[HeldTensor]) -> Iterator[Problem]:
    """`M013`: matrices of LoRA of another rank than adapter_config.json says.

    Source: peft 0.21, tuners/lora/model.py, `r_key`. A matrix of several experts has their ranks
    one under the other, and is left out.
    """
    config = found.config or {}
    if config.get("peft_type") != "LORA" or config.get("target_parameters"):
        yield from _against_pair(found, tensors)
        return
    wrong = []
    for each in tensors:
        module, _, letter = each.name.removeprefix("base_model.model.").rpartition(".lora_")
        axis, rank = {"A.weight": 0, "B.weight": 1}.get(letter), _rank_of(config, module)
        if axis is None or len(each.shape) < 2:
            continue
        if type(rank) is not int or rank < 1:
            what = f"adapter_config.json gives {module} the rank {rank!r}, which is no whole number"
            fix = f"write its rank into adapter_config.json: {each.name} has {each.shape[axis]}"
            yield Problem(code="M013", what=what, where=str(found.path), fix=fix)
            return
        if each.shape[axis] != rank:
            wrong.append(f"{each.name} ({each.shape[axis]}, the config has {rank})")
    if wrong:
        what = f"{len(wrong)} matrices are of another rank than adapter_config.json says: "
        fix = "write the r and rank_pattern that it was trained with into adapter_config.json"
        yield Problem(code="M013", what=what + listed(wrong), where=str(found.path), fix=fix)


def _against_pair(found: ForeignCheckpoint, tensors: Sequence[HeldTensor]) -> Iterator[Problem]:
    """`M013`: a matrix A of another rank than its B."""
    shapes = {each.name: each.shape for each in tensors if len(each.shape) == 2}
    wrong = [
        f"{name} ({shape[0]}, its lora_B has {other[1]})"
        for name, shape in shapes.items()
        if ".lora_A" in name
        and (other := shapes.get(name.replace(".lora_A", ".lora_B")))
        and other[1] != shape[0]
    ]
    if wrong:
        what = f"{len(wrong)} matrices are of another rank than their other half: {listed(wrong)}"
        yield Problem(code="M013", what=what, where=str(found.path), fix=COPY_AGAIN)


def _rank_of(config: Mapping[str, Any], module: str) -> Any:
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        with contextlib.suppress(re.error):
            if re.match(rf"(.*\.)?({pattern})$", module):
                return rank
    return config.get("r")


def _without_pair(found: ForeignCheckpoint, tensors: Sequence[HeldTensor]) -> Iterator[Problem]:
    """`M012`: matrices A of LoRA without their B, or B without A. peft leaves the other at random,
    or at zero."""
    alone = without_pair({each.name for each in tensors})
    if alone:
        what = f"matrices of LoRA without their other half: {listed(alone)}"
        yield Problem(code="M012", what=what, where=str(found.path), fix=COPY_AGAIN)


def _left_out(
    config: Mapping[str, Any], modules: Collection[str], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Modules of the base that the adapter should have matrices for, and has not.

    Source: peft 0.21, tuners/tuners_utils.py, `check_target_module_exists`: a name in
    `target_modules` is a whole name or its end.
    """
    targets = config.get("target_modules")
    rarely = ("layers_to_transform", "exclude_modules", "target_parameters", "layer_replication")
    if not isinstance(targets, list) or any(config.get(name) for name in rarely):
        return []
    ends = tuple(f".{target}.weight" for target in targets if isinstance(target, str))
    wanted = (
        name.removesuffix(".weight")
        for name, weight in stored.items()
        if f".{name}".endswith(ends) and len(weight.shape) == 2
    )
    known = {each.removeprefix("model.") for each in modules}
    return [name for name in wanted if name.removeprefix("model.") not in known]


def _against_base(
    found: ForeignCheckpoint, tensors: Sequence[HeldTensor], base: Path
) -> Iterator[Problem]:
    """`M013`: matrices of an adapter that no weight of the base goes with."""
    config = found.config or {}
    try:
        stored = stored_tensors(weight_files(base, str(base)), where=str(base))
    except PacelineError as error:
        yield from error.problems
        return
    shapes = {each.name.removeprefix("base_model.model."): each.shape for each in tensors}
    wrong = []
    for name, shape in shapes.items():
        linear, found_a, _ = name.partition(".lora_A")
        other = shapes.get(name.replace(".lora_A", ".lora_B"))
        if not found_a or other is None:
            continue
        weight = stored.get(f"{linear}.weight") or stored.get(
            f"{linear.removeprefix('model.')}.weight"
        )
        if weight is None:
            wrong.append(f"{name} has no weight in the base")
        elif len(weight.shape) == 2:
            size = weight.shape[::-1] if config.get("fan_in_fan_out") else weight.shape
            if (other[0], shape[1]) != size:
                wrong.append(
                    f"{linear} ({other[0]} x {shape[1]}, the base has {size[0]} x {size[1]})"
                )
    if wrong:
        what = f"{len(wrong)} matrices of the adapter do not go with {base.name}: {listed(wrong)}"
        fix = "give the base that it was trained beside in adapter_config.json"
        yield Problem(code="M013", what=what, where=str(found.path), fix=fix)
    modules = {name.partition(".lora_")[0] for name in shapes}
    if config.get("peft_type") == "LORA" and (left_out := _left_out(config, modules, stored)):
        what = (
            f"the adapter has no matrices for these of its target_modules, which stay as they are "
            f"in {base.name}: {listed(left_out)}"
        )
        yield Problem(code="M012", what=what, where=str(found.path), fix=COPY_AGAIN)
