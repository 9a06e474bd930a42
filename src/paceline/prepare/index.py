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
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
Ints = NDArray[np.int64]
Pack = Literal["windows", "documents", "pairs"]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Documents or tokens of a source that are not trained on, with the reason."""

    source: str
    reason: str
    documents: int
    example: str


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
    vocab: int
    """Token numbers are below this."""

    eos: int | None
    """The token that ends each document of `windows`."""

    seq_len: int
    pack: Pack
    """`windows`: sample i is the tokens i x seq_len to (i + 1) x seq_len of the source, documents
    joined. `documents`: sample p is pack p: its documents one after another, each at most
    seq_len + 1 tokens (inputs are all but the last, targets all but the first), the rest filled
    with targets that do not count. `pairs`: as documents, and pack p is the documents 2p (chosen)
    and 2p + 1 (rejected)."""

    dtype: DataType
    train: tuple[SourceIndex, ...]
    held_out: tuple[SourceIndex, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    left_out: tuple[LeftOut, ...] = ()
    form: int = FORM

    @property
    def padding(self) -> float:
        """Share of a batch's places that no document fills, in the mean over the training data."""
        if self.pack == "windows":
            return 0.0
        draws = [each.samples if each.weight is None else each.weight for each in self.train]
        shares = [each.padding(self.seq_len) for each in self.train]
        filled = sum(draw * share for draw, share in zip(draws, shares, strict=True))
        return filled / sum(draws) if any(draws) else 0.0


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


class SourceArrays(NamedTuple):
    """One source's files, mapped into memory: no more than the pages that the kernel keeps."""

    tokens: NDArray[np.unsignedinteger]
    bits: NDArray[np.uint8] | None
    """What `trained.bin` holds."""

    ends: Ints
    packs: tuple[Ints, Ints] | None
    """Where each pack begins, and the documents; None for windows."""

    def documents(self, pack: int) -> list[int]:
        """Numbers of the documents in a pack."""
        assert self.packs is not None, "windows have no packs"
        starts, documents = self.packs
        numbers: list[int] = documents[int(starts[pack]) : int(starts[pack + 1])].tolist()
        return numbers

    def span(self, document: int) -> tuple[int, int]:
        """A document's first token, and the one after its last."""
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])

    def trained(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Whether each of these tokens is trained on; None where all are."""
        if self.bits is None:
            return None
        bits = np.unpackbits(self.bits[start // 8 : -(-stop // 8)])
        return bits[start % 8 : start % 8 + stop - start].view(np.bool_)


def open_arrays(folder: Path, index: Index, source: SourceIndex) -> SourceArrays:
    """A source's arrays in a folder of prepared data.

    Raises:
        JobError: D020, a file is missing or has another size.
    """
    own = folder / source.folder
    dtype = np.dtype(index.dtype).newbyteorder("<")
    tokens = _mapped(own / TOKENS, dtype, source.tokens)
    bits = None
    if (own / TRAINED).exists():
        bits = _mapped(own / TRAINED, np.dtype(np.uint8), -(-source.tokens // 8))
    names = (ENDS, PACK_STARTS, PACK_DOCUMENTS) if index.pack != "windows" else (ENDS,)
    ends, *packs = (_loaded(own / name) for name in names)
    return SourceArrays(tokens, bits, ends, (packs[0], packs[1]) if packs else None)


def _mapped(path: Path, dtype: np.dtype, length: int) -> NDArray:  # type: ignore[type-arg]
    try:
        num_bytes = path.stat().st_size
        if num_bytes == length * dtype.itemsize:
            return np.memmap(path, dtype, "r", shape=(length,))
        found = f"{num_bytes:,} bytes"
    except OSError as error:
        found = error.strerror or str(error)
    raise _damaged(path, f"{found}; the index says {length * dtype.itemsize:,} bytes")


def _loaded(path: Path) -> Ints:
    try:
        array: Ints = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:  # numpy's for what is no array
        raise _damaged(path, getattr(error, "strerror", None) or str(error)) from None
    return array


def _damaged(path: Path, what: str) -> JobError:
    return JobError.of(
        code="D020",
        what=f"{path.name}: {what}",
        where=str(path),
        fix=f"delete {path.parents[2]} and prepare the data again: paceline data prepare job.yaml",
    )
