"""A tokenizer's files: `tokenizer.json`, its special tokens and its chat template."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.packages import import_package
from paceline.job.sources import find_tokenizer

BYTE_VOCAB = 256
BYTE_EOS = 10
"""With one token a byte, documents end with a line's end, as files of text do."""

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What is known of a tokenizer before anything is tokenized; travels between processes."""

    file: Path | None
    """`tokenizer.json`; None: one token a byte."""

    digest: str
    vocab: int
    """Token numbers are below this."""

    bos: int | None = None
    """Begins a document where the tokenizer puts it there."""

    eos: int | None = None
    special_tokens: dict[str, Any] = field(default_factory=dict)
    """`bos_token` and others, as templates know them."""

    template: str | None = None
    tool_template: str | None = None
    """The template for conversations with tools, where it is another."""

    template_file: Path | None = None


def read_tokenizer(job: Job) -> TokenizerFiles:
    """The job's tokenizer.

    Raises:
        JobError: D010, there is none, or it cannot be read.
    """
    file = find_tokenizer(job)
    if file is None:
        return TokenizerFiles(file=None, digest="bytes", vocab=BYTE_VOCAB, eos=BYTE_EOS)
    tokenizer = load_tokenizer(file)
    config = _config(file)
    texts = {name: _text(config[name]) for name in config if name in _KEPT and config[name]}
    names = {name: text for name, text in texts.items() if isinstance(text, str | list)}
    template, tool_template, template_file = _templates(job, file, config)
    eos = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    bos = tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None
    begins = tokenizer.encode("a", add_special_tokens=True).ids[:1]
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return TokenizerFiles(
        file=file,
        digest=xxhash.xxh3_128_hexdigest(file.read_bytes()),
        vocab=highest + 1,
        bos=bos if begins == [bos] else None,
        eos=eos,
        special_tokens=names,
        template=template,
        tool_template=tool_template,
        template_file=template_file,
    )


_KEPT = {f"{name}_token" for name in _SPECIAL} | {"additional_special_tokens"}


def load_tokenizer(file: Path) -> Any:
    """The tokenizer of a `tokenizer.json`, without truncation and padding.

    Raises:
        JobError: R010, the package is missing; D010, the file is no tokenizer.
    """
    need = "tokenizing needs the package tokenizers"
    tokenizers = import_package("tokenizers", need, where="model.tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  # the library raises plain Exceptions
        raise JobError.of(
            code="D010",
            what=f"{file} is no tokenizer that tokenizers reads: {error}",
            where="model.tokenizer",
            fix="give a folder with a tokenizer.json as transformers saves it",
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _config(file: Path) -> dict[str, Any]:
    """Settings in the files beside `tokenizer.json`: special tokens and the template."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        beside = file.with_name(name)
        if not beside.is_file():
            continue
        try:
            read = json.loads(beside.read_text(encoding="utf-8"))
            values |= read if isinstance(read, dict) else {}
        except (OSError, ValueError) as error:
            raise JobError.of(
                code="D010",
                what=f"{beside} cannot be read: {error}",
                where="model.tokenizer",
                fix="save the tokenizer again",
            ) from None
    return values


def _text(token: Any) -> Any:
    """Text of a token that is written with its properties."""
    if isinstance(token, list):
        return [_text(each) for each in token]
    return token.get("content", "") if isinstance(token, dict) else token


def _templates(
    job: Job, file: Path, config: dict[str, Any]
) -> tuple[str | None, str | None, Path | None]:
    """The template, the one for conversations with tools where it is another, and their file."""
    named = job.spec.model.chat_template
    path = job.folder / named if named != "auto" else file.with_name("chat_template.jinja")
    if named != "auto" or path.is_file():
        try:
            return path.read_text(encoding="utf-8"), None, path
        except (OSError, UnicodeDecodeError) as error:
            raise JobError.of(
                code="D012",
                what=f"the chat template {path} cannot be read: {error}",
                where=job.where("model.chat_template"),
                fix="give a .jinja file, relative to the job file",
            ) from None
    found, path = config.get("chat_template"), file.with_name("tokenizer_config.json")
    if isinstance(found, list):
        by_name = {each.get("name"): each.get("template") for each in found}
        return by_name.get("default"), by_name.get("tool_use"), path
    return found if isinstance(found, str) else None, None, path
