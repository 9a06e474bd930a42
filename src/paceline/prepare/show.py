"""The documents behind a sample number, as text, with the tokens that are trained on marked."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import JobError
from paceline.prepare.index import Index, SourceArrays, SourceIndex, open_arrays, open_index
from paceline.prepare.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDocument:
    """Part of a sample: a document, or in windows what is seen of it."""

    document: int
    parts: tuple[tuple[bool, str], ...]
    """Texts in order, each with whether its tokens are trained on."""

    num_tokens: int
    num_trained: int
    side: str = ""
    """`chosen` or `rejected`, for one answer of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A sample and what is in it."""

    sample: int
    source: str
    documents: tuple[ShownDocument, ...]
    filled: int
    """Places that no document fills."""


def show_sample(
    folder: Path, sample: int, tokenizer_file: Path | None, *, held_out: bool = False
) -> ShownSample:
    """The documents of one sample.

    Args:
        sample: Its number; ids run through the sources in the index's order.

    Raises:
        JobError: D021, there is no such sample.
    """
    index = open_index(folder)
    source, place = _find(index, sample, held_out=held_out)
    arrays = open_arrays(folder, index, source)
    decode = _decoder(tokenizer_file)
    spans = _spans(arrays, place, index.seq_len)
    documents: list[ShownDocument] = []
    for number, start, stop in spans:
        trained = arrays.trained(start, stop)
        if trained is None:
            trained = np.ones(stop - start, bool)
        if index.pack != "windows" or not documents:
            trained[:1] = False  # no token comes before it
        documents.append(
            ShownDocument(
                document=number,
                parts=tuple(_parts(arrays.tokens[start:stop], trained, decode)),
                num_tokens=stop - start,
                num_trained=int(trained.sum()),
                side=("chosen", "rejected")[number % 2] if index.pack == "pairs" else "",
            )
        )
    used = sum(stop - start for _, start, stop in spans) - (
        len(spans) if index.pack != "windows" else 1
    )
    return ShownSample(
        sample=sample,
        source=source.name,
        documents=tuple(documents),
        filled=index.seq_len - used,
    )


def _find(index: Index, sample: int, *, held_out: bool) -> tuple[SourceIndex, int]:
    place = sample
    sources = index.held_out if held_out else index.train
    for source in sources:
        if 0 <= place < source.samples:
            return source, place
        place -= source.samples
    total = sum(source.samples for source in sources)
    side = "held-out" if held_out else "training"
    raise JobError.of(
        code="D021",
        what=f"there is no {side} sample {sample}",
        where="--sample",
        fix=f"sample numbers are 0 to {total - 1}" if total else "nothing is held out",
    )


def _spans(arrays: SourceArrays, place: int, seq_len: int) -> list[tuple[int, int, int]]:
    """Document, first token and the one after the last, of each part of a sample."""
    if arrays.packs is not None:
        return [(number, *arrays.span(number)) for number in arrays.documents(place)]
    first, last = place * seq_len, (place + 1) * seq_len + 1
    begin, end = np.searchsorted(arrays.ends, [first, last - 1], side="right").tolist()
    spans = ((number, *arrays.span(number)) for number in range(begin, end + 1))
    return [(number, max(first, start), min(last, stop)) for number, start, stop in spans]


def _parts(tokens: Any, trained: Any, decode: Any) -> list[tuple[bool, str]]:
    """Runs of tokens that are all trained on, or all not."""
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    runs = [(a, b) for a, b in pairwise(edges) if b > a]
    return [(bool(trained[a]), decode(tokens[a:b].tolist())) for a, b in runs]


def _decoder(file: Path | None) -> Any:
    if file is None:
        return lambda ids: bytes(ids).decode(errors="replace")
    tokenizer = load_tokenizer(file)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
