"""Convert the GGUF file that `model.pretrained` names into a folder of safetensors, once."""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.gguf import (
    RECORD,
    GgufHeader,
    converted_folder,
    models_folder,
    read_gguf_header,
    write_record,
)
from paceline.job.pretrained import find_gguf
from paceline.launch.convert import convert, need_packages
from paceline.record.conversion import Conversion
from paceline.topology.machine import find_local_machine
from paceline.units import format_bytes, format_count

_MEMORY_A_PARAMETER = 8
"""Bytes: transformers holds the float32 value and the model's parameter at once. Measured: 1.36 GB
for SmolLM2-135M (Q4_1, transformers 5.23), about 7 a parameter above the libraries themselves."""

_DISK_A_PARAMETER = 8
"""Bytes: float32, as transformers saves it and as it is written again, both there at once."""


def convert_gguf(job: Job, say: Callable[[str], None]) -> None:
    """Convert the job's GGUF file where it has one that is not converted yet.

    Raises:
        JobError: `R010`, a package is missing; `M012`, the file is damaged; `M017`, memory or disk
            do not hold it.
        CheckpointError: `C012`, transformers cannot read it.
    """
    file = find_gguf(job)
    if file is None or converted_folder(job, file) is not None:
        return
    need_packages("gguf", "safetensors")
    header = _header(job, file)
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = models_folder(job) / f"{file.stem}-{sha256[:12]}"
    with _locked(folder):
        if not (folder / RECORD).exists():
            _check_room(job, file, header, folder.parent)
            say(
                f"converting  {file.name} ({format_count(header.num_parameters)} parameters) to "
                f"float32 safetensors, once: {folder}"
            )
            _convert(file, header, folder)
        write_record(folder, file, sha256)  # also where the same file has moved


def _convert(file: Path, header: GgufHeader, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        convert(
            Conversion(
                source=str(file),
                out=str(unfinished),
                source_form="gguf",
                form="safetensors",
            )
        )
        licence = header.fields.get("general.license")
        if isinstance(licence, str) and "\n" not in licence:
            card = f"---\nlicense: {licence}\n---\n\nConverted from {file.name}.\n"
            (unfinished / "README.md").write_text(card, encoding="utf-8")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _header(job: Job, file: Path) -> GgufHeader:
    try:
        return read_gguf_header(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError.of(
            code="M012",
            what=f"{file} cannot be read as GGUF: {reason}",
            where=job.where("model.pretrained"),
            fix="download the file again",
        ) from None


def _check_room(job: Job, file: Path, header: GgufHeader, folder: Path) -> None:
    for needed, available, of_what in (
        (
            header.num_parameters * _MEMORY_A_PARAMETER,
            find_local_machine().available_bytes,
            "memory, and {} are available",
        ),
        (
            header.num_parameters * _DISK_A_PARAMETER,
            shutil.disk_usage(folder).free,
            f"disk, and {folder} has {{}} free",
        ),
    ):
        if needed > available:
            raise JobError.of(
                code="M017",
                what=f"converting {file.name} ({format_count(header.num_parameters)} parameters, "
                f"float32) takes about {format_bytes(needed)} of "
                + of_what.format(format_bytes(available)),
                where=job.where("model.pretrained"),
                fix="convert it on a larger machine with `paceline checkpoint convert --from gguf "
                "--to safetensors`, or give the model's safetensors folder",
            )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        raise JobError.of(
            code="R002",
            what=f"{folder.parent} cannot be written: {error.strerror}",
            where="data.cache",
            fix="name a folder that you may write to by data.cache",
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
