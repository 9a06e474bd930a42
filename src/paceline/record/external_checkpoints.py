"""What a folder of another program's checkpoint says of itself: kind, step, layout. No torch.

    DeepSpeed    latest, global_step100/{mp_rank_00_model_states.pt, *_optim_states.pt}, or zero/
    Megatron     latest_checkpointed_iteration.txt, iter_0000100/{mp_rank_00*, .metadata}
    Trainer      trainer_state.json, optimizer.pt or optimizer_0/
    Accelerate   random_states_0.pkl, optimizer.bin or optimizer_0/
    weights      config.json, model*.safetensors or pytorch_model*.bin
    DCP          .metadata, *.distcp
    adapter      adapter_config.json, adapter_model.safetensors or .bin (peft)
    file         one file: .safetensors, or .pt, .pth, .bin, .ckpt of torch.save

Names of files are read, and of pickles the numbers and words that follow a name; nothing of a
pickle is executed. Leaves out whether the bytes are whole: none of these formats says.
"""

import contextlib
import json
import pickletools
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from paceline.record.conversion import Form

Kind = Literal[
    "deepspeed", "megatron", "trainer", "accelerate", "weights", "dcp", "adapter", "file"
]

NAMES: Mapping[Kind, str] = {
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "trainer": "a Hugging Face Trainer's checkpoint",
    "accelerate": "Accelerate's save_state",
    "weights": "weights of Hugging Face",
    "dcp": "torch.distributed.checkpoint",
    "adapter": "a peft adapter",
    "file": "one file of weights",
}
"""As a person reads them."""

FSDP_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of Accelerate's and Trainer's sharded weights and optimizer. Source: accelerate 1.15,
utils/fsdp_utils.py, `save_fsdp_model`, `save_fsdp_optimizer`."""

_NEWEST = {"megatron": "latest_checkpointed_iteration.txt", "deepspeed": "latest"}
"""Files that name the newest step in a folder."""

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of what `torch.save` writes."""

_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
_MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
_MEGATRON_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")
_STEP = re.compile(r"(?:global_step|iter_|checkpoint[-_]|step-)0*(\d+)(?:_universal)?$")
_MOST_PICKLE_BYTES = 64 * 2**20
"""Bytes of a pickle's program, which has no tensors in it. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """One checkpoint that Paceline did not write."""

    kind: Kind
    path: Path
    root: Path
    """What its own program is given."""

    step: int | None = None
    degrees: Mapping[str, int] = field(default_factory=dict)
    """`data`, `tensor`, `pipeline`, `ranks`: those that the files tell."""

    form: str = ""
    """Which form a kind with several has: `ZeRO-3`, `ZeRO-1 or 2`, `no ZeRO`, `universal`;
    `legacy`, `torch_dist`."""

    holds_optimizer: bool = False
    is_safetensors: bool = False
    optimizer_form: str | None = None
    """How Megatron laid the optimizer out; None where that is not known."""

    missing: Sequence[str] = ()
    """Files that must be there, by the names of the others."""

    config: Mapping[str, Any] | None = None
    """config.json of the model beside it; adapter_config.json of an adapter."""

    @property
    def wrote(self) -> str:
        """What it is and in which layout it was written, for a person."""
        degrees = ", ".join(f"{name} {size}" for name, size in sorted(self.degrees.items()))
        form = f" ({self.form})" if self.form else ""
        step = f", step {self.step}" if self.step is not None else ""
        return f"{NAMES[self.kind]}{form}{step}" + (f", {degrees}" if degrees else "")

    @property
    def optimizer_elsewhere(self) -> bool:
        """Whether optimizer state lies in files of its own, as Trainer and Accelerate write it."""
        return self.holds_optimizer and self.kind in ("trainer", "accelerate")

    @property
    def lost_newest(self) -> str:
        """What names the newest step in a folder that is not there, and that folder; or empty."""
        file = _NEWEST.get(self.kind)
        word = _word(self.root / file) if file else ""
        folder = f"iter_{int(word):07}" if self.kind == "megatron" and word.isdigit() else word
        return f"{file} names {folder}" if word and not (self.root / folder).exists() else ""

    @property
    def source(self) -> tuple[Form | None, Path]:
        """How its weights are kept, and where; None where it has none that are read."""
        if self.kind in ("deepspeed", "megatron", "adapter", "dcp"):
            return self.kind, self.path
        if self.kind == "file":
            return ("torch" if self.path.suffix in TORCH_FILES else "safetensors"), self.path
        if self.is_safetensors:
            return "safetensors", self.path
        if (self.path / FSDP_FOLDER / ".metadata").is_file():
            return "dcp", self.path / FSDP_FOLDER
        return ("torch" if any(self.path.glob("pytorch_model*.bin")) else None), self.path


def find_foreign(path: Path) -> ForeignCheckpoint | None:
    """The checkpoint that a folder or file is, or the newest one in a folder; None for others.

    Raises:
        OSError: The folder cannot be read.
    """
    if path.is_file() and path.suffix in (".safetensors", *TORCH_FILES):
        return ForeignCheckpoint(
            kind="file",
            path=path,
            root=path,
            is_safetensors=path.suffix == ".safetensors",
            config=_config(path.parent),
        )
    if not path.is_dir():
        return None
    steps = [(step, each) for each in path.iterdir() if (step := _step(each.name)) is not None]
    newest = [each for _, each in sorted(steps, reverse=True)]
    looked = (_one(each) for each in (path, *newest) if each.is_dir())
    torn = None
    for found in looked:
        if found is not None and not (found.kind == "dcp" and found.missing):
            return found
        torn = torn or found
    return torn


def _one(path: Path) -> ForeignCheckpoint | None:
    names = sorted(each.name for each in path.iterdir())
    for look in (_trainer, _accelerate, _deepspeed, _megatron, _adapter, _weights, _dcp):
        found = look(path, names)
        if found is not None:
            return found
    return None


def _trainer(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    if "trainer_state.json" not in names:
        return None
    inner = next((name for name in names if name.startswith("global_step")), None)
    if inner is not None:
        found = _deepspeed_step(path / inner, path)
        if found is not None:
            return found
    ranks = sum(re.fullmatch(r"rng_state_\d+\.pth", name) is not None for name in names)
    return ForeignCheckpoint(
        kind="trainer",
        path=path,
        root=path,
        step=_step(path.name),
        degrees={"ranks": ranks} if ranks else {},
        holds_optimizer="optimizer.pt" in names or "optimizer_0" in names,
        is_safetensors=_has_safetensors(names),
        config=_config(path),
    )


def _accelerate(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    ranks = sum(re.fullmatch(r"random_states_\d+\.pkl", name) is not None for name in names)
    if not ranks:
        return None
    zero = path / "pytorch_model"  # what its DeepSpeed plugin names the tag
    if zero.is_dir():
        found = _deepspeed_step(zero, path)
        if found is not None:
            return found
    return ForeignCheckpoint(
        kind="accelerate",
        path=path,
        root=path,
        step=_step(path.name),
        degrees={"ranks": ranks},
        holds_optimizer=any(name.startswith("optimizer") for name in names),
        is_safetensors=_has_safetensors(names),
    )


def _deepspeed(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    if "latest" in names:
        return _deepspeed_step(path / _word(path / "latest"), path)
    return _deepspeed_step(path, path.parent)


def _deepspeed_step(path: Path, root: Path) -> ForeignCheckpoint | None:
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    models = {int(found[1]) for name in names if (found := _MODEL_FILE.match(name))}
    zero = [found for name in names if (found := _ZERO_FILE.match(name))]
    if not models and not zero:
        return None
    optimizer = {(int(each[1]), int(each[2])) for each in zero if each[3] == "optim"}
    grid = optimizer or {(int(each[1]), int(each[2])) for each in zero}
    data = max((rank for rank, _ in grid), default=0) + 1
    sharing = max([*models, *(rank for _, rank in grid)]) + 1
    is_stage_3 = any(each[3] == "model" for each in zero)
    form = "ZeRO-3" if is_stage_3 else "ZeRO-1 or 2" if optimizer else "no ZeRO"
    is_pipeline = any(name.startswith("layer_") for name in names)
    degrees = {"model" if is_pipeline else "tensor": sharing}
    if grid:
        degrees["data"] = data
    lost = set(product(range(data), range(sharing))) - grid if grid else set()
    return ForeignCheckpoint(
        kind="deepspeed",
        path=path,
        root=root,
        step=_step(path.name),
        degrees=degrees,
        form="universal" if "zero" in names and (path / "zero").is_dir() else form,
        holds_optimizer=bool(optimizer) or form == "no ZeRO",
        config=_config(root),
        missing=[
            f"zero_pp_rank_{rank}_mp_rank_{other:02}_optim_states.pt"
            for rank, other in sorted(lost)
        ],
    )


def _megatron(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    root = path
    if "latest_checkpointed_iteration.txt" in names:
        word = _word(path / "latest_checkpointed_iteration.txt")
        path = path / (f"iter_{int(word):07}" if word.isdigit() else word)
        names = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    elif not path.name.startswith("iter_"):
        return None
    else:
        root = path.parent
    if "common.pt" in names or "metadata.json" in names:
        wanted = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        told = _told(path / "common.pt", (*wanted, "distrib_optim_sharding_type"))
        tensor, pipeline = (told.get(name) for name in wanted)
        kept = told.get("distrib_optim_sharding_type")
        return ForeignCheckpoint(
            kind="megatron",
            path=path,
            root=root,
            step=_step(path.name),
            degrees={
                name: size
                for name, size in (("tensor", tensor), ("pipeline", pipeline))
                if isinstance(size, int)
            },
            form="torch_dist",
            holds_optimizer=True,
            optimizer_form=str(kept) if kept is not None else None,
        )
    ranks = [found for name in names if (found := _MEGATRON_RANK.match(name))]
    if not ranks:
        return None
    tensor = max(int(each[1]) for each in ranks) + 1
    pipeline = max(int(each[2] or 0) for each in ranks) + 1
    there = {(int(each[1]), int(each[2] or 0)) for each in ranks}
    lost = set(product(range(tensor), range(pipeline))) - there
    return ForeignCheckpoint(
        kind="megatron",
        path=path,
        root=root,
        step=_step(path.name),
        degrees={"tensor": tensor, "pipeline": pipeline},
        form="legacy",
        holds_optimizer=True,
        missing=[f"mp_rank_{one:02}_{other:03}" for one, other in sorted(lost)],
    )


def _adapter(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    has_weights = any(name in names for name in ("adapter_model.safetensors", "adapter_model.bin"))
    has_config = "adapter_config.json" in names
    if not (has_config or has_weights) or _has_safetensors(names):
        return None
    told = _json(path / "adapter_config.json") if has_config else {}
    missing = {"adapter_model.safetensors": has_weights, "adapter_config.json": has_config}
    return ForeignCheckpoint(
        kind="adapter",
        path=path,
        root=path,
        missing=[name for name, is_there in missing.items() if not is_there],
        form=f"{told.get('peft_type')}, rank {told.get('r')}" if has_config else "",
        config=told,
    )


def _weights(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    is_safetensors = _has_safetensors(names)
    is_pickled = any(re.fullmatch(r"pytorch_model.*\.bin", name) for name in names)
    missing = _missing_shards(path, names)
    if not is_safetensors and not is_pickled and not missing:
        return None
    return ForeignCheckpoint(
        kind="weights",
        path=path,
        root=path,
        is_safetensors=is_safetensors,
        missing=missing,
        config=_config(path),
    )


def _dcp(path: Path, names: Sequence[str]) -> ForeignCheckpoint | None:
    files = [name for name in names if name.endswith(".distcp")]
    if not files and ".metadata" not in names:
        return None
    ranks = {name.split("_")[2] for name in files if re.match(r"__\d+_\d+\.distcp", name)}
    return ForeignCheckpoint(
        kind="dcp",
        path=path,
        root=path,
        step=_step(path.name),
        degrees={"ranks": len(ranks) or len(files)} if files else {},
        holds_optimizer=True,
        missing=[] if files and ".metadata" in names else [".metadata" if files else "*.distcp"],
    )


def _missing_shards(path: Path, names: Iterable[str]) -> list[str]:
    for name in names:
        if name.endswith(".index.json"):
            told = _json(path / name).get("weight_map")
            if isinstance(told, dict):
                return sorted({str(file) for file in told.values()} - set(names))
    return []


def _told(path: Path, names: Iterable[str]) -> dict[str, int | str]:
    """What follows each name in the pickle of a torch file: a number or a word.

    The pickle's program is read, not run. Empty where it is no such file.
    """
    with contextlib.suppress(OSError, zipfile.BadZipFile, StopIteration, ValueError):
        with zipfile.ZipFile(path) as archive:
            inside = next(each for each in archive.namelist() if each.endswith("data.pkl"))
            program = archive.open(inside).read(_MOST_PICKLE_BYTES)
        return _pairs(program, set(names))
    return {}


def _pairs(program: bytes, names: set[str]) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    last: str | None = None
    for operation, argument, _ in pickletools.genops(program):
        if "PUT" in operation.name or operation.name == "MEMOIZE":
            continue
        if last is not None and isinstance(argument, int | str) and "GET" not in operation.name:
            found.setdefault(last, argument)
        last = argument if isinstance(argument, str) and argument in names else None
    return found


def _has_safetensors(names: Iterable[str]) -> bool:
    return any(name.endswith(".safetensors") and "adapter" not in name for name in names)


def _config(path: Path) -> dict[str, Any] | None:
    return _json(path / "config.json") or None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _step(name: str) -> int | None:
    found = _STEP.search(name)
    return int(found[1]) if found else None
