"""Rows into documents: what is in their columns, as tokens, with those that are trained on."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.prepare.chat import (
    LeftOutError,
    NotMaskable,
    check_conversation,
    check_written,
    completed,
    find_turns,
    history_of,
    marked_turns,
    marks_generations,
    messages_of,
    with_system,
)
from paceline.prepare.columns import label_name
from paceline.prepare.index import DataType
from paceline.prepare.pairs import chat_pair, text_pair
from paceline.prepare.rows import Row, decode_line
from paceline.prepare.template import ChatTemplate, Message, TemplateFailed
from paceline.prepare.tokenizer import TokenizerFiles, load_tokenizer

Text = tuple[str, list[tuple[int, int]]]
"""A document's text, and the characters that are trained on."""

_PLAIN = ("completion", "preference")
"""Kinds whose texts begin and end with the tokenizer's own tokens, and spell no special ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How rows of a source become documents; travels between processes, and is part of the cache's
    key."""

    kind: str
    """`text`, `chat`, `completion`, `classification`, `tokens`; of pairs `preference` (texts) and
    `chat preference` (messages)."""

    columns: Mapping[str, str]
    """What a column is -> its name in the rows."""

    unread: tuple[str, ...] = ()
    """Columns of the first row that are not read."""

    tokenizer: TokenizerFiles
    train_on: str
    dtype: DataType
    labels: tuple[str, ...] = ()
    longest: int | None = None
    """Tokens that a longer text is cut to before its label, for `classification`."""


class Document(NamedTuple):
    """One document's tokens."""

    tokens: NDArray[Any]
    trained: NDArray[np.bool_] | None
    """Whether each token is a target; None: all are."""

    key: int
    """Hash of its content, which decides whether it is held out."""

    is_last: bool = True
    """False: the next one continues this document."""


@dataclass(slots=True)
class Batch:
    """Documents of some rows, and what became of the others."""

    documents: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    """Reason -> number of the first row."""

    broken: list[tuple[int, str]] = field(default_factory=list)
    refused: tuple[int, str] | None = None
    """A row whose template cannot be masked, which ends everything."""

    def leave_out(self, row: Row, reason: str) -> None:
        """Count a row, or what is lost of it."""
        self.left_out[reason] += 1
        self.examples.setdefault(reason, row.number)


class Encoder:
    """Makes documents of rows; one in each process that tokenizes."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        file = recipe.tokenizer.file
        self._tokenizer = load_tokenizer(file) if file is not None else None
        if self._tokenizer is not None and recipe.kind in ("text", "classification", *_PLAIN):
            self._tokenizer.encode_special_tokens = True  # texts hold none, whatever they spell

    def encode(self, rows: Sequence[Row]) -> Batch:
        """The documents of some rows, in order."""
        batch = Batch()
        taken: list[tuple[Row, Any]] = []
        for row in rows:
            try:
                value = decode_line(row.value) if isinstance(row.value, bytes) else row.value
                is_piece = not row.is_whole
                read = self._READERS[self._recipe.kind]
                taken.append((row, (value, None) if is_piece else read(self, value)))
            except LeftOutError as error:
                batch.leave_out(row, str(error))
            except NotMaskable as error:
                batch.refused = batch.refused or (row.number, str(error))
            except (ValueError, TemplateFailed) as error:  # msgspec's errors are ValueErrors
                batch.broken.append((row.number, str(error)))
        self._tokenize(taken, batch)
        return batch

    def _tokenize(self, taken: Iterable[tuple[Row, Any]], batch: Batch) -> None:
        read = list(taken)
        if self._recipe.kind == "tokens":
            batch.documents += [found for _, found in read]
        elif self._tokenizer is None:
            batch.documents += [self._bytes(row, text) for row, (text, _) in read]
        elif self._recipe.kind in ("text", "classification"):
            encodings = self._tokenizer.encode_batch_fast(
                [text for _, (text, _) in read], add_special_tokens=False
            )
            for (row, (text, label)), encoding in zip(read, encodings, strict=True):
                batch.documents.append(
                    self._closed(row, text, encoding.ids)
                    if label is None
                    else self._labelled(batch, row, text, label, encoding.ids)
                )
        else:
            of_row = [(row, each) for row, found in read for each in _as_several(found)]
            encodings = self._tokenizer.encode_batch(
                [text for _, (text, _) in of_row], add_special_tokens=False
            )
            masked = (
                (row, self._masked(text, spans, encoding))
                for (row, (text, spans)), encoding in zip(of_row, encodings, strict=True)
            )
            each = 2 if self._recipe.kind.endswith("preference") else 1
            for together in zip(*[masked] * each, strict=True):
                self._add_masked(batch, together)

    def _bytes(self, row: Row, text: str) -> Document:
        content = text.encode(errors="replace")
        end = b"\n" if row.is_last else b""
        tokens = np.frombuffer(content + end, np.uint8).astype(self._recipe.dtype)
        return Document(tokens, None, _key(text), row.is_last)

    def _closed(self, row: Row, text: str, ids: list[int]) -> Document:
        files = self._recipe.tokenizer
        begin = [files.bos] if row.is_first and files.bos is not None else []
        end = [files.eos] if row.is_last and files.eos is not None else []
        tokens = np.asarray([*begin, *ids, *end], dtype=self._recipe.dtype)
        return Document(tokens, None, _key(text), row.is_last)

    def _labelled(self, batch: Batch, row: Row, text: str, label: int, ids: list[int]) -> Document:
        """A text's tokens, and its label as the one that follows: only that is trained on."""
        files, longest = self._recipe.tokenizer, self._recipe.longest
        tokens = [*([files.bos] if files.bos is not None else []), *ids]
        if longest is not None and len(tokens) > longest:
            tokens = tokens[:longest]
            batch.leave_out(row, f"longer than seq_len {longest}: cut")
        trained = np.zeros(len(tokens) + 1, bool)
        trained[-1] = True
        whole = np.asarray([*tokens, label], dtype=self._recipe.dtype)
        return Document(whole, trained, _key(text))

    def _add_masked(self, batch: Batch, together: Sequence[tuple[Row, Document]]) -> None:
        """The documents of one row: of pairs two, and both have a token to train on or neither is
        taken. The first one's hash counts for all."""
        (row, first), *_ = together
        documents = [document._replace(key=first.key) for _, document in together]
        if all(document.trained is not None and document.trained.any() for document in documents):
            batch.documents += documents
        else:
            batch.leave_out(row, "no token is left to train on")

    def _masked(self, text: str, spans: Sequence[tuple[int, int]], encoding: Any) -> Document:
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        starts, stops = offsets[:, 0], offsets[:, 1]
        trained = np.zeros(len(offsets), bool)
        for start, stop in spans:
            trained |= (starts >= start) & (stops <= stop) & (stops > starts)
        ids, files = encoding.ids, self._recipe.tokenizer
        if self._recipe.kind in _PLAIN:
            begin = [] if files.bos is None else [files.bos]
            end = [] if files.eos is None else [files.eos]
            trained = np.concatenate([np.zeros(len(begin), bool), trained, np.ones(len(end), bool)])
            ids = [*begin, *ids, *end]
        if self._recipe.train_on == "all":
            trained[:] = True
        trained[:1] = False  # nothing comes before it
        # Pairs of one prompt are on one side: their hash is the prompt's.
        hashed = text[: spans[0][0]] if self._recipe.kind.endswith("preference") else text
        return Document(np.asarray(ids, dtype=self._recipe.dtype), trained, _key(hashed))

    def _optional(self, row: Any, name: str) -> Any:
        return row.get(self._recipe.columns.get(name, name))

    def _column(self, row: Any, name: str, default: Any = None) -> Any:
        column = self._recipe.columns.get(name, name)
        if column in row:
            return row[column]
        if default is not None:
            return default
        raise ValueError(f"it has no {column}")

    def _text_of(self, row: Any) -> tuple[str, None]:
        text = row if isinstance(row, str) else self._column(row, "text")
        if text is None or (isinstance(text, str) and not text.strip()):
            raise LeftOutError("an empty document")
        if not isinstance(text, str):
            raise ValueError(f"its text is {type(text).__name__}")
        return text, None

    def _tokens_of(self, row: Any) -> Document:
        ids = np.asarray(self._column(row, "tokens"))
        if ids.ndim != 1 or ids.dtype.kind not in "ui":
            raise ValueError("its tokens are no list of whole numbers")
        if not len(ids):
            raise LeftOutError("an empty document")
        lowest, highest, vocab = int(ids.min()), int(ids.max()), self._recipe.tokenizer.vocab
        if lowest < 0 or highest >= vocab:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"it holds the token {wrong}, and token numbers are below {vocab}")
        key = xxhash.xxh3_64_intdigest(ids.astype("<u4").tobytes())
        return Document(ids.astype(self._recipe.dtype), None, key)

    def _completion_of(self, row: Any) -> tuple[str, list[tuple[int, int]]]:
        self._refuse_beside(row, "a completion", "set data.kind: chat")
        prompt, completion = self._prompt_and_answer(row)
        text = prompt + completion
        return text, [(len(prompt), len(text))]

    def _prompt_and_answer(self, row: Any) -> tuple[str, str]:
        names = self._recipe.columns
        if "instruction" in names:
            asked, given = self._column(row, "instruction"), self._column(row, "input", "") or ""
            if not isinstance(asked, str) or not isinstance(given, str):
                raise ValueError("its instruction or input is not text")
            prompt = f"{asked}\n\n{given}" if given else asked
            pair = (prompt, self._column(row, "output"))
        else:
            pair = (self._column(row, "prompt"), self._column(row, "completion"))
        for side, text in zip(("prompt", "completion"), pair, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"its {side} is {type(text).__name__}, not text")
            if not text.strip():
                raise LeftOutError(f"an empty {side}")
        if "instruction" in names and self._recipe.kind == "completion":
            return pair[0] + "\n\n", pair[1]
        return pair

    def _chat_of(self, row: Any) -> tuple[str, list[tuple[int, int]]]:
        messages = with_system(self._messages_of(row), self._optional(row, "system"))
        check_conversation(messages, self._special)
        tools = self._tools_of(row)
        return self._rendered(messages, tools)

    def _messages_of(self, row: Any) -> list[Message]:
        names = self._recipe.columns
        if "messages" in names:
            return messages_of(self._column(row, "messages"))
        if "conversations" in names:
            turns = self._column(row, "conversations")
            return messages_of(turns, role="from", content="value")
        if "completion" in names and isinstance(row.get(names["completion"]), list):
            return completed(self._column(row, "prompt"), row[names["completion"]])
        prompt, answer = self._prompt_and_answer(row)
        before = history_of(self._optional(row, "history"))
        asked, said = {"role": "user", "content": prompt}, {"role": "assistant"}
        return [*before, asked, {**said, "content": answer}]

    def _labelled_of(self, row: Any) -> tuple[str, int]:
        text = self._column(row, "text")
        if not isinstance(text, str) or not text.strip():
            raise ValueError("its text is empty" if isinstance(text, str) else "it has no text")
        return text, label_number(self._column(row, "label"), self._recipe.labels)

    def _refuse_beside(self, row: Any, kind: str, fix: str) -> None:
        """What only a conversation has a place for."""
        for name in ("system", "history"):
            if self._optional(row, name):
                raise ValueError(f"{kind} has no place for its {name}: {fix}")

    def _text_pair_of(self, row: Any) -> list[Text]:
        self._refuse_beside(row, "a pair of texts", "give prompt, chosen and rejected as messages")
        prompt, *answers = text_pair(*self._sides_of(row))
        start = len(prompt)
        return [(prompt + answer, [(start, start + len(answer))]) for answer in answers]

    def _chat_pair_of(self, row: Any) -> list[Text]:
        tools, system = self._tools_of(row), self._optional(row, "system")
        sides = [with_system(side, system) for side in chat_pair(*self._sides_of(row))]
        for messages in sides:
            check_conversation(messages, self._special)
        return [self._rendered(messages, tools) for messages in sides]

    def _sides_of(self, row: Any) -> tuple[Any, Any, Any]:
        chosen, rejected = (self._column(row, side) for side in ("chosen", "rejected"))
        return self._optional(row, "prompt"), chosen, rejected

    def _tools_of(self, row: Any) -> list[Any] | None:
        tools = self._optional(row, "tools") or None
        if isinstance(tools, str):
            tools = msgspec.json.decode(tools)
        if tools is not None and not isinstance(tools, list):
            raise ValueError(f"its tools is {type(tools).__name__}, not a list")
        return tools or None

    def _rendered(
        self, messages: Sequence[Any], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        template, is_marked = self._templates[tools is not None]
        last_only = self._recipe.train_on == "last"
        if last_only:  # what follows the last turn of the assistant is of no use
            last = max(n for n, m in enumerate(messages) if m["role"] == "assistant")
            messages = messages[: last + 1]
        text, marked = template.render(messages, tools=tools)
        check_written(template, text, messages, tools)
        if self._recipe.train_on == "all":
            return text, [(0, len(text))]
        if is_marked:
            return text, marked_turns(marked, messages, last_only=last_only)
        return text, find_turns(template, text, messages, tools, last_only=last_only)

    @cached_property
    def _templates(self) -> tuple[tuple[ChatTemplate, bool], tuple[ChatTemplate, bool]]:
        """Without and with tools: the template, and whether it marks generations."""
        files = self._recipe.tokenizer
        texts = [files.template or "", files.tool_template or files.template or ""]
        plain, tool = (
            (ChatTemplate(text, files.special_tokens), marks_generations(text)) for text in texts
        )
        return plain, tool

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches the text of any special token."""
        assert self._tokenizer is not None, "conversations have a tokenizer"
        added = self._tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    _READERS = {  # noqa: RUF012
        "text": _text_of,
        "tokens": _tokens_of,
        "completion": _completion_of,
        "chat": _chat_of,
        "classification": _labelled_of,
        "preference": _text_pair_of,
        "chat preference": _chat_pair_of,
    }


def _as_several(found: Any) -> list[Text]:
    """The texts of a row: of pairs there are two."""
    return found if isinstance(found, list) else [found]


def label_number(label: Any, labels: Sequence[str]) -> int:
    """Number of a row's label, which is a class's name or its number.

    Raises:
        ValueError: It is none of them.

    >>> label_number("pos", ("neg", "pos")), label_number(0, ("neg", "pos"))
    (1, 0)
    """
    name = label_name(label)
    if name is not None and name in labels:
        return labels.index(name)
    if name is not None and name.isdigit() and int(name) < len(labels):
        return int(name)
    raise ValueError(f"its label {label!r:.40} is none of {', '.join(labels)}")


def _key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))
