"""What prepared data are on disk: `index.json`, and one folder of arrays for each source.

In a source's folder:

| file | holds |
| --- | --- |
| `tokens.bin` | all documents' tokens, one after another, little-endian uint16 or uint32 |
| `ends.npy` | int64: where each document ends in `tokens.bin`, ascending |
| `trained.bin` | `np.packbits` of one bit a token: is it a target; absent where all are |
| `pack_starts.npy` | int64, documents packed alone: pack p holds the documents ... |
| `pack_documents.npy` | ... `pack_documents[pack_starts[p] : pack_starts[p + 1]]` |

Leaves out: how samples are drawn from them (`runtime/data`).
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import JobError

INDEX = "index.json"
FORM = 1
"""Changes when a reader of today could not read what is written."""

TOKENS, ENDS, TRAINED = "tokens.bin", "ends.npy", "trained.bin"
PACK_STARTS, PACK_DOCUMENTS = "pack_starts.npy", "pack_documents.npy"

DataType = Literal["uint16", "uint32"]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Documents or tokens of a source that are not trained on, with the reason."""

    source: str
    reason: str
    documents: int
    example: str
    """File and line, or row, of the first one."""


class SourceIndex(msgspec.Struct, frozen=True, kw_only=True):
    """One source's documents on one side: training or held out."""

    name: str
    weight: float | None
    """Its share of the samples beside the others' weights; None: by size."""

    folder: str
    """Below the index's own folder."""

    documents: int
    tokens: int
    targets: int
    """Tokens that count in the loss, once an epoch."""

    samples: int
    source_files: dict[str, str]
    """Name of each file that was read -> hash of its contents."""

    def padding(self, seq_len: int) -> float:
        """Share of its samples' places that no document fills."""
        places = self.samples * seq_len
        return max(0.0, 1 - (self.tokens - self.documents) / places) if places else 0.0


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What was prepared, from what, and with which settings."""

    tokenizer: str
    """Hash of the tokenizer."""

    vocab: int
    """Token numbers are below this."""

    eos: int | None
    """The token that ends each document of `windows`."""

    seq_len: int
    pack: Literal["windows", "documents"]
    """`windows`: sample i is the tokens i x seq_len to (i + 1) x seq_len of the source, documents
    joined. `documents`: sample p is pack p: its documents one after another, each at most
    seq_len + 1 tokens (inputs are all but the last, targets all but the first), the rest filled
    with targets that do not count."""

    dtype: DataType
    train: tuple[SourceIndex, ...]
    held_out: tuple[SourceIndex, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    left_out: tuple[LeftOut, ...] = ()
    form: int = FORM


def write_index(folder: Path, index: Index) -> None:
    """Write `index.json`, the last file of prepared data: whole or not there at all."""
    text = msgspec.json.format(msgspec.json.encode(index, order="deterministic"), indent=1)
    unfinished = folder / f"{INDEX}.unfinished"
    unfinished.write_bytes(text)
    unfinished.replace(folder / INDEX)


def open_index(folder: Path) -> Index:
    """The index in a folder of prepared data.

    Raises:
        JobError: There is none, or another version of Paceline wrote it (D020).
    """
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
        found = f"form {index.form}"
    except FileNotFoundError:
        index, found = None, "no index.json"
    except (OSError, msgspec.MsgspecError) as error:
        index, found = None, str(error)
    if index is not None and index.form == FORM:
        return index
    raise JobError.of(
        code="D020",
        what=f"{folder} holds no data prepared in form {FORM}: {found}",
        where=str(path),
        fix="prepare them again: paceline data prepare job.yaml; delete the folder if it is old",
    )


def fingerprint(folder: Path) -> str:
    """Hash of `index.json`, which holds the hash of every file that was read: 16 hex digits."""
    return hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()[:16]


def data_type(vocab: int) -> DataType:
    """The narrowest type that holds every token number."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def write_documents(
    folder: Path,
    documents: Iterable[NDArray[np.unsignedinteger[Any]]],
    *,
    dtype: DataType,
    trained: Iterable[NDArray[np.bool_]] | None = None,
    packs: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> None:
    """Write one source's arrays from documents that fit into memory.

    Args:
        folder: The source's own, made if it is not there.
        documents: Tokens of each.
        dtype: As in the index.
        trained: Whether each token is a target, as long as the documents; None where all are.
        packs: `(pack_starts, pack_documents)`, where samples are packs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [np.asarray(document, dtype="<" + np.dtype(dtype).str[1:]) for document in documents]
    np.concatenate(arrays).tofile(folder / TOKENS)
    np.save(folder / ENDS, np.cumsum([len(array) for array in arrays], dtype=np.int64))
    if trained is not None:
        np.packbits(np.concatenate(list(trained))).tofile(folder / TRAINED)
    if packs is not None:
        np.save(folder / PACK_STARTS, packs[0].astype(np.int64))
        np.save(folder / PACK_DOCUMENTS, packs[1].astype(np.int64))
