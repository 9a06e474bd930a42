"""Files of tokens: nanoGPT's `.bin`, llm.c's, and Megatron's `.bin` with `.idx`."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.errors import JobError
from paceline.prepare.documents import Document, Recipe

_LLM_C, _LLM_C_HEADER = 20240520, 1024
"""llm.c's first number, and the bytes of its header (karpathy/llm.c, `dataloader.h`)."""

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of types that hold token numbers (Megatron-LM, `core/datasets/indexed_dataset.py`)."""

_AT_ONCE = 1 << 22
"""Tokens that are looked through at once."""


def token_documents(file: str, recipe: Recipe) -> Iterator[list[Document]]:
    """The documents of a file, some at a time.

    Raises:
        JobError: D002, its index does not fit; D021, a token is beyond the vocabulary.
    """
    path = Path(file)
    index = path.with_suffix(".idx")
    if index.is_file():
        tokens, ends = _read_megatron(path, index)
    else:
        tokens = _read_plain(path)
        ends = _ends_after(tokens, recipe.tokenizer.eos)
    vocab, start = recipe.tokenizer.vocab, 0
    for first in range(0, len(ends), 1024):
        documents = []
        for end in ends[first : first + 1024].tolist():
            documents.append(_document(path, tokens[start:end], recipe, vocab))
            start = end
        yield [document for document in documents if len(document.tokens)]


def _document(path: Path, tokens: NDArray[Any], recipe: Recipe, vocab: int) -> Document:
    highest, lowest = int(tokens.max(initial=0)), int(tokens.min(initial=0))
    if highest >= vocab or lowest < 0:
        wrong = highest if highest >= vocab else lowest
        raise JobError.of(
            code="D021",
            what=f"it holds the token {wrong}, and token numbers are below {vocab}",
            where=str(path),
            fix="give the model and the tokenizer that it was made for; a .bin without an .idx is "
            "read as nanoGPT's uint16",
        )
    copied = np.ascontiguousarray(tokens.astype(recipe.dtype))
    return Document(copied, None, xxhash.xxh3_64_intdigest(copied.tobytes()))


def _read_plain(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        start = file.read(4)
    header = _LLM_C_HEADER if start == struct.pack("<i", _LLM_C) else 0
    if (path.stat().st_size - header) % 2 or path.stat().st_size <= header:
        raise _damaged(path, "it is no file of uint16 tokens: its number of bytes is odd, or 0")
    return np.memmap(path, "<u2", "r", offset=header)


def _ends_after(tokens: NDArray[Any], eos: int | None) -> NDArray[np.int64]:
    """Ends of documents, each after its end-of-text token; without one, the file's end."""
    found = [np.zeros(0, np.int64)]
    if eos is not None:
        found += [
            np.flatnonzero(tokens[start : start + _AT_ONCE] == eos) + start + 1
            for start in range(0, len(tokens), _AT_ONCE)
        ]
    ends = np.concatenate(found).astype(np.int64)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _read_megatron(path: Path, index: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Tokens, and the ends of the index's sequences."""
    raw = index.read_bytes()
    head = len(_MEGATRON) + struct.calcsize("<QBQQ")
    if not raw.startswith(_MEGATRON) or len(raw) < head:
        raise _damaged(index, "it does not begin as Megatron's index does")
    version, code, sequences, _ = struct.unpack_from("<QBQQ", raw, len(_MEGATRON))
    if version != 1 or code not in _MEGATRON_TYPES or len(raw) < head + 4 * sequences:
        raise _damaged(index, f"version {version}, type {code}, {sequences} sequences")
    lengths = np.frombuffer(raw, "<i4", sequences, head)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.memmap(path, _MEGATRON_TYPES[code], "r")
    if len(ends) and ends[-1] != len(tokens):
        raise _damaged(path, f"it holds {len(tokens)} tokens, its index {ends[-1]}")
    return tokens, ends


def _damaged(path: Path, what: str) -> JobError:
    return JobError.of(
        code="D002", what=what, where=str(path), fix="copy the file again, with its .idx"
    )
