"""Section `data` of the job file: what to train on. Its rules are in `data_rules.py`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from paceline.job.section import Number, Positive, section


def _named(value: object) -> object:
    """Truth values as names, which Python would count as 1 and 0."""
    return str(value).lower() if isinstance(value, bool) else value


Share = Annotated[Number, Field(ge=0, lt=1)]


@section
class SourceSpec:
    """Files that are read together, and their share of what is trained on."""

    path: str | list[str]
    """Glob, folder or list of them, relative to the job file, or a URL of fsspec:
    `s3://bucket/chats/*.jsonl`."""

    weight: Annotated[Number, Field(gt=0)] | None = None
    """Share of the samples, beside the other sources' weights. Left out everywhere: by size."""

    name: str | None = None
    """Name on screens and in the record. Left out, it is made from `path`."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of a row is what, where the names differ: `{text: content}`. What there can be:
    text, messages, conversations, prompt, completion, instruction, input, output, history,
    system, tools, tokens, chosen, rejected, label."""


Kind = Literal["auto", "text", "chat", "completion", "preference", "classification", "tokens"]


@section
class DataSpec:
    """What to train on: text, conversations or tokens."""

    path: str | list[str] | None = None
    """Glob, folder or list of them, relative to the job file: `corpus/**/*.txt`. Without a
    tokenizer these files are read as bytes. With `engine: megatron` or `megatron-bridge`, prefixes
    of token files as its tools/preprocess_data.py writes them (PREFIX.bin, PREFIX.idx); with
    `torchtitan`, one folder of rows (JSON, Parquet) with a column `text`."""

    corpus: Literal["python-stdlib", "mock"] | None = None
    """`python-stdlib`: a corpus every Python has, the source of its own standard library (about
    30 MB). `mock`: samples that Megatron makes up, to try a plan's speed; other engines refuse
    it."""

    sources: list[SourceSpec] | None = None
    """In place of `path`: several sources, with weights. Rows are read from jsonl, json, csv,
    parquet and arrow files, also compressed (gz, zst); of any other file the whole text is one
    document."""

    kind: Kind = "auto"
    """What a row is. `text`: a document. `chat`: a conversation. `completion`: a prompt, and what
    follows it. `preference`: a prompt with a chosen and a rejected answer, which are one sample.
    `classification`: a text and its label, one of `labels`.
    `tokens`: tokenized already (nanoGPT's .bin, Megatron's .bin with .idx, a column). `auto` looks
    at the columns, and never takes pairs by itself."""

    labels: list[Annotated[str | int, BeforeValidator(_named)]] | None = None
    """Only with `kind: classification`: the classes, in the order of their numbers. Rows name them,
    or give the number; true and false are names too."""

    seq_len: Annotated[Positive, Field(gt=1)] = 256
    """Tokens in one sample."""

    pack: Literal["auto", "windows", "documents"] = "auto"
    """How documents become samples. `windows`: joined, and cut every `seq_len` tokens.
    `documents`: whole documents packed together, which do not see each other. `auto` is documents
    for conversations and completions, else windows. Of preferences a sample is always a pair."""

    too_long: Literal["refuse", "drop", "cut", "split"] = "refuse"
    """Only with documents: what happens to one that is longer than a sample. `refuse` the job,
    `drop` the document, `cut` its end off, or `split` it into several (text only)."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Only with conversations and completions: which tokens count in the loss. `assistant`: all
    of its turns, and of a completion all but the prompt. `last`: the last turn. `all`: every
    token."""

    held_out: Share = 0.05
    """Share kept for evaluation. Without a tokenizer, of the files, chosen by a hash of each file's
    name, and of a single file its end. Else of the documents, by a hash of each one's content."""

    held_out_path: str | list[str] | None = None
    """In place of `held_out`: files of their own for evaluation. Needs a tokenizer or `sources`."""

    broken_rows: Share = 0.01
    """Share of a source's rows that may be broken, or left out because they are empty, one-sided or
    hold special tokens; they are counted. More stop the preparation, with file and line."""

    cache: str | None = None
    """Folder for what is prepared. Left out, `.paceline/data` beside the job file."""
