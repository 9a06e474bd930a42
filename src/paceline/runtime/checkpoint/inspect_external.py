"""Look into another program's checkpoint: request on stdin, answer on stdout, both JSON.

    python -m paceline.runtime.checkpoint.inspect_external < request.json

What it holds; and where it is asked, whether every value is a number, the shapes are those of the
model that config.json describes, and the tokenizer loads and stays inside the embedding.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, Problem, reason_of
from paceline.profile.fitting import listed
from paceline.record.conversion import HeldTensor, Look, Seen
from paceline.runtime.answer import answer
from paceline.runtime.checkpoint.external import Entry, Weights, tensors_in
from paceline.runtime.checkpoint.fit import check_fit
from paceline.runtime.checkpoint.pickles import read_pickle
from paceline.runtime.checkpoint.readers import read_weights
from paceline.runtime.checkpoint.state_files import nonfinite_in
from paceline.units import counted

_Said = tuple[list[str], list[str], list[Problem]]
"""What was checked, what was not and why, and what is wrong."""


def look(asked: Look) -> Seen:
    try:
        weights = read_weights(asked.form, Path(asked.path), asked.key)
    except PacelineError as error:
        return Seen(problems=tuple(error.problems))
    except Exception as error:  # noqa: BLE001 - a file that has something else than its name says
        why = f"it has no {error}" if isinstance(error, KeyError) else reason_of(error)
        what = f"layout not read: {Path(asked.path).name} is not laid out as {asked.form}: {why}"
        fix = "give the folder as its program wrote it, or export the weights with that program"
        return Seen(problems=(Problem(code="C012", what=what, where=asked.path, fix=fix),))
    config = asked.config or weights.config
    checked, skipped, problems = list[str](), list[str](), list[Problem]()
    warnings: list[Problem] = []
    if asked.scan:
        for kind, entries in _values(asked, weights, problems):
            wrong = list(_scan(asked, entries))
            problems += wrong
            if entries and not wrong:
                checked.append(
                    f"every value of {counted(len(entries), 'tensor')}{kind} is a number"
                )
        if weights.unread and not weights.others:
            skipped.append(f"optimizer state: {weights.unread}")
        if config is not None and asked.form != "adapter":
            shapes = {name: each.shape for name, each in weights.entries.items()}
            fit = check_fit(config, shapes, where=asked.path)
            checked += [fit.checked] if fit.checked else []
            skipped += [fit.skipped] if fit.skipped else []
            problems += fit.problems
        if asked.tokenizer is not None:
            warnings += _tokenizer(asked, config or {}, (checked, skipped, problems))
    held = [
        HeldTensor(name=name, dtype=str(each.dtype).removeprefix("torch."), shape=each.shape)
        for name, each in weights.entries.items()
    ]
    return Seen(
        tensors=tuple(held),
        optimizer=_optimizer(weights),
        notes=weights.notes,
        config=config,
        checked=tuple(checked),
        skipped=tuple(skipped),
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _optimizer(weights: Weights) -> str:
    if weights.unread:
        return f"there is one that `checkpoint convert` does not read: {weights.unread}"
    keys = dict.fromkeys(key for state in weights.optimizer.values() for key in state)
    return f"{', '.join(keys)} of {len(weights.optimizer)} parameters" if keys else ""


def _values(
    asked: Look, weights: Weights, problems: list[Problem]
) -> Iterator[tuple[str, Mapping[str, Entry]]]:
    """What there is to read, by what it is; files that cannot be read are problems."""
    yield "", weights.entries
    state = {
        f"{key} of {owner}": each
        for owner, keys in weights.optimizer.items()
        for key, each in keys.items()
    }
    for file in asked.optimizers:
        try:
            held = tensors_in(read_pickle(Path(file)), Path(file).name)
        except PacelineError as error:
            problems += error.problems
        else:
            state |= _without_starts(held)
    yield " of optimizer state", state
    others = _without_starts(weights.others)
    outermost = dict.fromkeys(name.partition(".")[0] for name in others)
    yield f" under {', '.join(outermost)}", others


def _without_starts(held: Mapping[str, Entry]) -> dict[str, Entry]:
    """Without single infinite numbers, which a best loss is before the first."""
    return {n: each for n, each in held.items() if each.shape or not each.load().isinf()}


def _scan(asked: Look, entries: Mapping[str, Entry]) -> Iterator[Problem]:
    """`C016`: tensors with values that are NaN or infinite; `M012`: those that cannot be read."""
    wrong: list[str] = []
    for name, each in entries.items():
        try:
            values = each.load()
        except Exception as error:  # noqa: BLE001 - a damaged file fails in its library's own way
            yield Problem(
                code="M012",
                what=f"{name} cannot be read: {reason_of(error)}",
                where=asked.path,
                fix="copy or download the file again",
            )
            continue
        if found := nonfinite_in(values):
            wrong.append(f"{name} ({found})")
    if wrong:
        yield Problem(
            code="C016",
            what=f"{counted(len(wrong), 'tensor')} with values that are no numbers: "
            f"{listed(wrong)}",
            where=asked.path,
            fix="take an earlier checkpoint; `paceline diagnose` finds where a loss became NaN",
        )


def _tokenizer(asked: Look, config: Mapping[str, Any], said: _Said) -> Iterator[Problem]:
    """`C017`: the tokenizer does not load, or has tokens that the embedding has no row for.

    Yields:
        What shows that it is another model's: warnings.
    """
    checked, skipped, problems = said
    fix = "copy the tokenizer's files of the same model beside config.json"
    try:
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            asked.tokenizer, local_files_only=True
        )
        largest = max(tokenizer.get_vocab().values())
    except ImportError as error:
        skipped.append(f"the tokenizer: {error}")
        return
    except Exception as error:  # noqa: BLE001 - whatever the library says of the files is shown
        what = f"the tokenizer does not load: {reason_of(error)}"
        problems.append(Problem(code="C017", what=what, where=str(asked.tokenizer), fix=fix))
        return
    text = config.get("text_config") or config
    rows = text.get("vocab_size")
    if rows is not None and largest >= rows:
        what = f"the tokenizer has tokens up to {largest}, and the embedding {rows} rows"
        problems.append(Problem(code="C017", what=what, where=str(asked.tokenizer), fix=fix))
        return
    said_of = f"is {largest}" if rows is None else f"{largest} is below {rows}"
    checked.append(f"the tokenizer loads; its largest token {said_of}")
    for what in _of_another_model(text, rows, largest):
        yield Problem(code="C017", what=what, where=str(asked.tokenizer), fix=fix)


_PADDED_ROWS = 1024
"""Rows that a vocabulary is padded by at most: Megatron's --make-vocab-size-divisible-by, 128,
times 8 tensor ranks."""

_SPARE_SHARE = 0.05
"""Share of an embedding's rows beyond those that a tokenizer leaves unused: twice what the
published model with most spare rows has, DeepSeek-V2, 102,400 for 100,002 tokens (config.json)."""


def _of_another_model(text: Mapping[str, Any], rows: int | None, largest: int) -> Iterator[str]:
    """What a tokenizer that stays inside the embedding lacks of the model's own."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = text.get(key)
        for token in given if isinstance(given, list) else [given]:
            if isinstance(token, int) and token > largest:
                yield f"{key} of config.json is {token}, the tokenizer's largest token {largest}"
    spare = 0 if rows is None else rows - largest - 1
    if rows is not None and spare > max(_PADDED_ROWS, _SPARE_SHARE * rows):
        yield (
            f"the embedding has {rows} rows and the tokenizer {largest + 1} tokens: {spare} rows "
            "to spare are more than padding, so it seems to be another model's"
        )


if __name__ == "__main__":
    answer(Look, look)
