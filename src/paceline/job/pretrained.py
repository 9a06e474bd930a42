"""Find the trained weights that `model.pretrained` names: their folder, files and config.json.

A folder, or the name of a model in this machine's Hugging Face cache. Nothing is downloaded. No
tensor is read; what the tensors must be is checked where they are loaded.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError, Problem
from paceline.job.adapters import start_files
from paceline.job.gguf import converted_folder
from paceline.job.hf_config import read_hf_config
from paceline.job.job import Job
from paceline.job.safetensors import place_in

INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model*.bin"
"""Weights in a form that can run code when it is read."""

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_BESIDE = (
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "generation_config.json", "spiece.model"),
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """Trained weights on this machine's disk."""

    folder: Path
    """Absolute, with `config.json` and the weights in it."""

    name: str
    """What other programs load it by: the name of a model in the Hugging Face cache, else the
    folder."""

    weights: tuple[Path, ...]
    """The safetensors files."""

    config: Mapping[str, Any]
    """Fields of `config.json`."""

    tokenizer: Path | None
    """Folder of the model's tokenizer; None where the folder has none."""

    commit: str | None
    """Commit of the files of a model in the Hugging Face cache."""

    where: str
    """Its place in the job, for messages."""

    start: tuple[Path, ...] = ()
    """Files of the adapter that the job continues from, its weights first."""

    def digest(self) -> str:
        """SHA-256, 64 hex digits, of config.json, every weight file and those of the adapter.
        Reads all of them.

        Raises:
            JobError: `M012`, one cannot be read.
        """
        paths = (self.folder / "config.json", *self.weights, *self.start)
        try:
            with ThreadPoolExecutor() as threads:  # hashing lets other threads run
                hashes = list(threads.map(_hash, paths))
        except OSError as error:
            raise JobError.of(
                code="M012",
                what=f"{error.filename} cannot be read: {error.strerror}",
                where=self.where,
                fix="download the file again, or let this user read it",
            ) from None
        lines = [f"{path.name} {each}\n" for path, each in zip(paths, hashes, strict=True)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def find_pretrained(job: Job) -> Pretrained | None:
    """The weights that the job's model starts from; None when it names none.

    Raises:
        JobError: `M011`, nothing is there by that name; `M002`, its config.json cannot be read;
            `M012`, its weights are missing, incomplete or in another form.
    """
    if job.spec.model.pretrained is None:
        return None
    where = job.where("model.pretrained")
    gguf = find_gguf(job)
    if gguf is not None:
        folder, commit = _converted(job, gguf), None
    else:
        folder, commit = _find_folder(job, job.spec.model.pretrained)
    return Pretrained(
        folder=folder,
        name=str(folder) if commit is None else job.spec.model.pretrained,
        weights=weight_files(folder, where),
        config=_read_config(folder, where),
        tokenizer=tokenizer_in(folder),
        commit=commit,
        where=where,
        start=start_files(job),
    )


def find_gguf(job: Job) -> Path | None:
    """The GGUF file that the job's model starts from, itself or as its folder's only weights.

    Raises:
        JobError: `M011`, nothing is there by that name, or it is one part of a model.
    """
    name = job.spec.model.pretrained
    if name is None:
        return None
    path = job.folder / os.path.expanduser(name)
    if not (path.is_file() and path.suffix == ".gguf"):
        folder, _ = (path, None) if path.is_file() else _find_folder(job, name)
        found = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
        if not found or any(folder.glob("*.safetensors")):
            return None
        if len(found) > 1:
            raise JobError.of(
                code="M011",
                what=f"{folder} has {len(found)} GGUF files and no safetensors: "
                + ", ".join(each.name for each in found[:8]),
                where=job.where("model.pretrained"),
                fix=f"name one of them: model.pretrained: {os.path.join(name, found[0].name)}",
            )
        path = found[0]
    if _PART.search(path.name):
        raise JobError.of(
            code="M011",
            what=f"{path.name} is one part of a model in several files",
            where=job.where("model.pretrained"),
            fix="join the parts with llama.cpp's `llama-gguf-split --merge FIRST OUT`",
        )
    return path


def _converted(job: Job, gguf: Path) -> Path:
    folder = converted_folder(job, gguf)
    if folder is not None:
        return folder
    raise JobError.of(
        code="M011",
        what=f"{gguf} is not converted to safetensors yet",
        where=job.where("model.pretrained"),
        fix="`paceline plan` or `paceline run` with the job file converts it once",
    )


def loads_weights(job: Job) -> bool:
    """Whether the job starts from trained weights."""
    return job.spec.model.pretrained is not None and job.spec.model.weights != "drawn"


def check_unused(job: Job) -> Iterator[Problem]:
    """Weights or a tokenizer beside `model.hf_config` that a run would not use."""
    model = job.spec.model
    if model.hf_config is None or model.weights == "drawn":
        return
    path = job.folder / model.hf_config
    folder = path if path.is_dir() else path.parent
    if not path.exists() or (path.is_file() and path.name != "config.json"):
        return
    beside = [
        each.name
        for pattern in (
            "*.safetensors",
            PICKLES,
            *(("tokenizer.json",) if model.tokenizer == "auto" else ()),
        )
        for each in sorted(folder.glob(pattern))
    ]
    if beside:
        yield Problem(
            code="M016",
            what=f"model.hf_config takes config.json alone, and {', '.join(beside[:4])} beside it "
            "would not be used: the model would start from random weights",
            where=job.where("model.hf_config"),
            fix=f"to start from them, write model.pretrained: {_relative(folder, job.folder)}; to "
            "train from random weights, set model.weights: drawn",
        )


def _relative(folder: Path, start: Path) -> str:
    return os.path.relpath(folder, start) if folder.is_relative_to(start) else str(folder)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_beside(folder: Path) -> tuple[str, ...]:
    """What a model's folder has beside config and weights and any program that uses it needs: the
    tokenizer's files, chat templates and the settings of generation."""
    return tuple(str(path) for name in _BESIDE for path in sorted(folder.glob(name)))


def weight_files(folder: Path, where: str) -> tuple[Path, ...]:
    """The safetensors files of a folder: `model.safetensors`, those that its index names, or all
    of them. In the order in which `from_pretrained` looks.

    Raises:
        JobError: `M012`, there is none, or one that the index names is not there.
    """
    single = folder / "model.safetensors"
    if single.exists():
        return (single,)
    if (folder / INDEX).exists():
        return _indexed(folder, where)
    found = tuple(sorted(folder.glob("*.safetensors")))
    found = tuple(path for path in found if path.name != "adapter_model.safetensors")
    if not found:
        raise _no_weights(folder, where)
    return found


def tokenizer_in(folder: Path) -> Path | None:
    """The folder, where it has a tokenizer's files."""
    return folder if any((folder / name).exists() for name in _TOKENIZERS) else None


def folder_of(name: str, beside: Path) -> Path | None:
    """The folder of a model on this machine: a path from here or from `beside`, or the main
    revision in the Hugging Face cache; None where it is neither."""
    model = hub_cache() / f"models--{name.replace('/', '--')}"
    main = model / "refs/main"
    commit = main.read_text(encoding="utf-8").strip() if main.is_file() else "main"
    tried = (Path(name), beside / name, model / "snapshots" / commit)
    return next((each for each in tried if name and each.is_dir()), None)


def hub_cache() -> Path:
    """The folder where Hugging Face's libraries keep models, by their environment variables."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else caches / "huggingface") / "hub"


def _find_folder(job: Job, name: str) -> tuple[Path, str | None]:
    path = job.folder / os.path.expanduser(name)
    if path.is_dir():
        if job.spec.model.revision is not None:
            raise JobError.of(
                code="J007",
                what=f"model.pretrained {name} is a folder, which has no revisions",
                where=job.where("model.revision"),
                fix="remove model.revision, or give the name of a model in the Hugging Face cache",
            )
        return path.resolve(), None
    if path.exists():
        raise JobError.of(
            code="M011",
            what=f"model.pretrained {name} is a file",
            where=job.where("model.pretrained"),
            fix="give the folder that holds config.json and the safetensors files, or a .gguf file",
        )
    if _HUB_NAME.fullmatch(name) is None or name.startswith("."):
        raise JobError.of(
            code="M011",
            what=f"there is no folder {path}",
            where=job.where("model.pretrained"),
            fix="give a folder relative to the job file, or the name of a model in the Hugging "
            "Face cache such as HuggingFaceTB/SmolLM2-135M",
        )
    return _find_in_cache(job, name)


def _find_in_cache(job: Job, name: str) -> tuple[Path, str]:
    """The snapshot of a hub name, and its commit."""
    revision = job.spec.model.revision or "main"
    model = hub_cache() / f"models--{name.replace('/', '--')}"
    if not model.is_dir():
        raise JobError.of(
            code="M011",
            what=f"{name} is neither a folder beside the job file nor a model in the Hugging Face "
            f"cache {hub_cache()}",
            where=job.where("model.pretrained"),
            fix=f"download it on a machine with a network: `hf download {name}`, or give its "
            "folder; Paceline downloads nothing itself",
        )
    ref = model / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = model / "snapshots" / commit
    if ".." in revision or not snapshot.is_dir():
        kept = [path.name for path in sorted((model / "snapshots").glob("*"))]
        raise JobError.of(
            code="M011",
            what=f"the Hugging Face cache has {name}, but not its revision {revision}",
            where=job.where("model.revision"),
            fix=f"`hf download {name} --revision {revision}`"
            + (f", or use one that is there: {', '.join(kept)}" if kept else ""),
        )
    return snapshot, commit


def _read_config(folder: Path, where: str) -> Mapping[str, Any]:
    fix = "give a folder as `save_pretrained` writes it, with a config.json"
    return read_hf_config(folder / "config.json", where=where, fix=fix).values


def _indexed(folder: Path, where: str) -> tuple[Path, ...]:
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
        paths = tuple(folder / name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no table of weight files"
        raise JobError.of(
            code="M012",
            what=f"{folder / INDEX} cannot be read: {reason}",
            where=where,
            fix="download the file again",
        ) from None
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise JobError.of(
            code="M012",
            what=f"{len(missing)} of {len(paths)} weight files that {INDEX} names are missing: "
            f"{', '.join(missing[:8])}{' and more' if len(missing) > 8 else ''}",
            where=place_in(where, folder),
            fix="download the missing files again; they belong beside config.json",
        )
    return paths


def _no_weights(folder: Path, where: str) -> JobError:
    pickles = [path.name for path in sorted(folder.glob(PICKLES))]
    what, fix = "no .safetensors files", "give a folder with safetensors files and a config.json"
    if (folder / "adapter_model.safetensors").exists():
        what += ", only adapters (adapter_model.safetensors)"
        fix = "give the folder of the model that the adapters are for, or merge them with peft"
    elif pickles:
        what += f", only pickled weights ({', '.join(pickles[:3])})"
        fix = (
            "reading them as they are can run code; convert them: `paceline checkpoint convert "
            f"{shlex.quote(str(folder))} OUT --from torch --to safetensors`"
        )
    return JobError.of(code="M012", what=f"{folder} has {what}", where=where, fix=fix)
