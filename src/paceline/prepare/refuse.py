"""Reasons not to prepare, or not to train on what was prepared, each with its code and the fix.

Each `check_` raises a JobError; its first line has the code and when.
"""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.pretrained import find_pretrained, loads_weights
from paceline.job.sources import Source
from paceline.prepare.documents import Recipe
from paceline.prepare.index import Index
from paceline.prepare.join import Cut, Joined, Side
from paceline.prepare.parts import Part, PartArrays
from paceline.prepare.rows import form_of, place_of
from paceline.prepare.template import FAILS, ChatTemplate, TemplateFailed
from paceline.prepare.tokenizer import TokenizerFiles, load_tokenizer
from paceline.profile.resolve import resolve_config, resolve_decoder
from paceline.units import bytes_apart, format_bytes

_BYTES_A_BYTE = {"uint16": 1.5, "uint32": 3.0}
"""Disk that a byte of plain text takes at the most, with a part and its join there at once: 3.5
bytes a token (measured: Python source, SmolLM2's tokenizer), and a byte a token for targets."""

_RENAMED = 0.01
"""Share of a vocabulary whose tokens may have been given other names. A guess: the reserved ones
that people rename are fewer, and tokenizers of two models differ in most."""

_SHOWN = 3
"""Broken rows, and reasons to leave rows out, that are named."""

_COMPRESSED = 5.0
"""Text in a byte of a compressed, parquet or arrow file, a guess."""


def model_vocab(job: Job) -> int | None:
    """Size of the model's vocabulary; None where only its own code knows."""
    if job.spec.model.factory is not None:
        return None
    asked = resolve_config(job)
    if asked is None:
        shape = resolve_decoder(job)
        return None if shape is None else shape.vocab
    inner = asked.config.get("text_config") or asked.config
    vocab = inner.get("vocab_size") if isinstance(inner, Mapping) else None
    return vocab if isinstance(vocab, int) else None


def check_vocabulary(job: Job, tokenizer: TokenizerFiles) -> None:
    """D011, the tokenizer has tokens that the model does not."""
    vocab = model_vocab(job)
    if vocab is None or tokenizer.vocab <= vocab:
        return
    what = f"the tokenizer has token numbers up to {tokenizer.vocab - 1}, the model's vocabulary "
    fix = f"give the model's own tokenizer, or a model with a vocabulary of {tokenizer.vocab} or "
    fix += "more; the embedding is not grown"
    raise _of_tokenizer(job, "D011", f"{what}is {vocab}", fix)


def check_own_tokens(job: Job, tokenizer: TokenizerFiles) -> None:
    """D011, a pretrained model has another tokenizer of its own."""
    found = find_pretrained(job) if loads_weights(job) else None
    own = found.folder / "tokenizer.json" if found is not None else None
    if own is None or tokenizer.file is None or not own.is_file() or own.samefile(tokenizer.file):
        return
    known, given = (load_tokenizer(file).get_vocab() for file in (own, tokenizer.file))
    other = [token for token, number in known.items() if given.get(token) != number]
    if len(other) <= _RENAMED * len(known):
        return
    what = f"{len(other)} of {len(known)} tokens of the pretrained model have another number in "
    what += f"{tokenizer.file} or none, such as {other[0]!r}"
    fix = "leave model.tokenizer out: the model's own is used; to train from random weights, set "
    raise _of_tokenizer(job, "D011", what, f"{fix}model.weights: drawn")


def _of_tokenizer(job: Job, code: str, what: str, fix: str) -> JobError:
    return JobError.of(code=code, what=what, where=job.where("model.tokenizer"), fix=fix)


def check_forms(job: Job, source: Source) -> None:
    """D016, a file of the source holds something else than the others, or than the job says."""
    held = {
        file: {"bin": "tokens", "text": "text"}.get(form_of(file), "rows") for file in source.files
    }
    asked, first = job.spec.data.kind, source.files[0]
    allowed = {held[first]} if asked == "auto" else {"rows", asked}
    for file, holds in held.items():
        if holds not in allowed:
            other = f"{first} holds {held[first]}" if asked == "auto" else f"data.kind is {asked}"
            raise JobError.of(
                code="D016",
                what=f"{file} holds {holds}, and {other}",
                where=source.where,
                fix="give the file a source of its own in data.sources, or leave it out",
            )


def needs_template(job: Job, tokenizer: TokenizerFiles) -> JobError:
    """D012: conversations without a template."""
    return JobError.of(
        code="D012",
        what=f"the rows are conversations, and {tokenizer.file} has no chat template",
        where=job.where("model.chat_template"),
        fix="give a .jinja file by model.chat_template",
    )


def check_template(job: Job, tokenizer: TokenizerFiles) -> None:
    """D012, the chat template is no template."""
    try:
        for text in filter(None, (tokenizer.template, tokenizer.tool_template)):
            ChatTemplate(text, tokenizer.special_tokens)
    except TemplateFailed as error:
        raise _template_fails(job, tokenizer, str(error)) from None


def check_rendered(job: Job, tokenizer: TokenizerFiles, part: Part) -> None:
    """D012, the chat template raised for every row."""
    reasons = [reason for _, reason in part.first_broken]
    if reasons and part.broken == part.rows and all(each.startswith(FAILS) for each in reasons):
        raise _template_fails(job, tokenizer, f"{reasons[0]}, for each of {part.rows} rows")


def _template_fails(job: Job, tokenizer: TokenizerFiles, why: str) -> JobError:
    return JobError.of(
        code="D012",
        what=f"the chat template in {tokenizer.template_file} fails: {why.removeprefix(FAILS)}",
        where=job.where("model.chat_template"),
        fix="repair the template, or give one that these rows go with by model.chat_template, a "
        ".jinja file",
    )


def needs_eos(job: Job, tokenizer: TokenizerFiles) -> JobError:
    """D012: documents that are joined without a token between them."""
    what = f"{tokenizer.file} names no eos_token that it has, which ends each document"
    fix = 'put a tokenizer_config.json with "eos_token" beside it; texts also go with '
    return _of_tokenizer(job, "D012", what, f"{fix}data.pack: documents")


def windows_of_chats(job: Job, kinds: set[str]) -> JobError:
    """J007: windows would cut through turns."""
    return JobError.of(
        code="J007",
        what=f"data.pack windows cuts through rows of kind {', '.join(sorted(kinds))}",
        where=job.where("data.pack"),
        fix="use documents, which is auto",
    )


def make_cache(job: Job, cache: Path) -> None:
    """Make the folder that prepared data are kept in. D015, it cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return
        reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    raise JobError.of(
        code="D015",
        what=f"prepared data cannot be kept in {cache}: {reason}",
        where=job.where("data.cache"),
        fix="name a folder that can be written by data.cache",
    )


def check_disk(job: Job, cache: Path, sizes: Mapping[str, int], dtype: str) -> None:
    """D015, what is prepared would not fit."""
    packed = (".gz", ".zst", ".parquet", ".arrow")
    plain = sum(
        size * (_COMPRESSED if name.endswith(packed) else 1) for name, size in sizes.items()
    )
    needed = int(plain * _BYTES_A_BYTE[dtype])
    free = shutil.disk_usage(cache).free
    if needed <= free:
        return
    takes, has = bytes_apart(needed, free)
    raise JobError.of(
        code="D015",
        what=f"preparing {format_bytes(sum(sizes.values()))} takes up to {takes} of disk, and "
        f"{cache} has {has} free",
        where=job.where("data.cache"),
        fix="make room, or name a folder on a larger disk by data.cache",
    )


def check_broken(job: Job, source: Source, recipe: Recipe, parts: Sequence[Part]) -> None:
    """D013, more of a source's rows are broken or left out than the job allows; D012, the template
    fails for all of them; D016, all rows of a file are broken."""
    rows, broken = sum(part.rows for part in parts), sum(part.broken for part in parts)
    limit, newest = job.spec.data.broken_rows, parts[-1]
    if 0 < newest.broken == newest.rows < rows:
        raise JobError.of(
            code="D016",
            what=f"no row of {newest.file} can be read as those of {parts[0].file}: "
            + "; ".join(places_of(newest)),
            where=source.where,
            fix="give the file a source of its own in data.sources, or leave it out",
        )
    if broken == rows:
        check_rendered(job, recipe.tokenizer, newest)
    left_out = _counted(recipe.kind, rows, parts) if len(parts) == len(source.files) else Counter()
    wrong = broken + left_out.total()
    if wrong <= limit * rows:
        return
    firsts = {why: part for part in reversed(parts) for why in part.examples}
    shown = [
        f"{count} x {why}, first {example_of(firsts[why], why)}"
        for why, count in left_out.most_common(_SHOWN)
    ]
    shown += [place for part in parts for place in places_of(part)][:_SHOWN]
    what = "broken or left out" if left_out else "broken"
    raise JobError.of(
        code="D013",
        what=f"{wrong} of {rows} rows of {source.name} are {what}, above "
        f"data.broken_rows {limit:g}: " + "; ".join(shown),
        where=source.where,
        fix="repair or remove these rows, "
        + ("name each of their labels in data.labels, " if job.spec.data.labels else "")
        + "map columns by data.sources, or raise data.broken_rows to leave such rows out",
    )


def _counted(kind: str, rows: int, parts: Sequence[Part]) -> Counter[str]:
    """Rows that were left out for what they hold, by reason. Empty texts are common: they count
    where they are most of the rows. What a job asks to be cut does not count."""
    left_out: Counter[str] = Counter()
    for part in parts:
        left_out.update(part.left_out)
    for reason in [reason for reason in left_out if reason.startswith("longer than ")]:
        del left_out[reason]
    is_text = kind in ("text", "tokens")
    return Counter() if is_text and left_out.total() <= rows / 2 else left_out


def places_of(part: Part) -> list[str]:
    """The first broken rows of a file, each with its reason."""
    form = form_of(part.file)
    return [f"{place_of(part.file, form, n)}: {reason}" for n, reason in part.first_broken]


def example_of(part: Part, reason: str) -> str:
    """Place of the first row that was left out for this reason."""
    return place_of(part.file, form_of(part.file), part.examples[reason])


def check_classes(
    job: Job, source: Source, recipe: Recipe, side: Side, arrays: Sequence[PartArrays]
) -> None:
    """
    Raises:
        JobError: D019, all texts to train on have one label.
    """
    if not recipe.labels:
        return
    parts = zip(arrays, side.stops, strict=True)
    found = sorted({int(label) for part, stops in parts for label in part.tokens[stops - 1]})
    if len(found) == 1:
        raise JobError.of(
            code="D019",
            what=f"every text of {source.name} has the label {recipe.labels[found[0]]}",
            where=source.where,
            fix="give texts of the other classes too, or map the right column: "
            "columns: {label: NAME}",
        )


def check_too_long(job: Job, source: Source, cut: Cut, joined: Sequence[Joined]) -> None:
    """D017, documents are longer than a sample, and nobody said what to do with them."""
    number = sum(side.too_long for side in joined)
    if cut.too_long != "refuse" or not number:
        return
    documents = number + sum(side.documents for side in joined) // cut.each
    unit = "pairs" if cut.pack == "pairs" else "documents"
    lost = sum(side.too_long_targets for side in joined)
    targets = lost + sum(side.targets for side in joined)
    raise JobError.of(
        code="D017",
        what=f"{number} of {documents} {unit} of {source.name} are longer than data.seq_len "
        f"{cut.seq_len}, with {lost / max(1, targets):.1%} of the targets",
        where=job.where("data.too_long"),
        fix="raise data.seq_len, or set data.too_long to cut, drop or (for text) split",
    )


def check_samples(job: Job, index: Index) -> None:
    """D018, a source has nothing to train on; D005, nothing is held out."""
    for source in index.train:
        if source.samples:
            continue
        reasons = [f"{each.documents} {each.reason}" for each in index.left_out]
        more = f"; left out: {', '.join(reasons)}" if reasons else ""
        raise JobError.of(
            code="D018",
            what=f"{source.name} has no sample to train on: {source.documents} documents with "
            f"{source.tokens} tokens, data.seq_len {index.seq_len}{more}",
            where=job.where("data"),
            fix=f"{'lower' if index.pack == 'windows' else 'raise'} data.seq_len, or give more "
            "documents",
        )
    asked = job.spec.data.held_out > 0 or job.spec.data.held_out_path is not None
    if asked and not any(source.samples for source in index.held_out):
        raise JobError.of(
            code="D005",
            what="too little is held out for one sample: "
            f"{sum(source.tokens for source in index.held_out)} tokens",
            where=job.where("data.held_out"),
            fix="hold out more, give more documents, or set data.held_out: 0 to train without "
            "evaluation",
        )
