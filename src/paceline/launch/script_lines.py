"""What one printed line says of training: a table of how loops and frameworks print.

Pure. `read_line` takes a piece of output between two line ends or carriage returns. A new framework
is a row of `catalog/training_lines.toml` and its lines, or a log, in tests/launch/.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.catalog.load import read_shipped
from paceline.record.sanitize import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A progress bar as tqdm draws it."""

    done: int
    total: int | None
    title: str
    is_inner: bool
    """Whether it is drawn below another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What a line says. Numbers may be nan or inf; what is not there is unknown."""

    step: int | None = None
    num_steps: int | None = None
    epoch: int | None = None
    num_epochs: int | None = None
    of_epoch: bool = False
    """Whether `step` and `num_steps` are surely counted within the epoch: batches are."""

    values: Mapping[str, float] = field(default_factory=dict)
    """By our names where we have one: `loss`, `grad_norm`, `learning_rate`, `tokens_per_s`, `mfu`,
    `step_s`, `eval_loss`, `eval_accuracy`."""

    checkpoint: str | None = None
    bar: Bar | None = None


_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?(?:nan|inf)\b"
)
_LOSS = r"(?:(?:train(?:ing)?|lm|step|avg|mean|average|total)[ _/-])?loss(?:[_/](?:train|step))?"
_EVALUATION = r"(?:val(?:id(?:ation)?)?|eval(?:uation)?|test)"
_NAMES: tuple[tuple[str, str], ...] = (
    ("eval_loss", rf"{_EVALUATION}[ _/-](?:avg[ _]|mean[ _]|average[ _])?loss(?:[_/]epoch)?"),
    ("eval_accuracy", rf"{_EVALUATION}[ _/-]acc(?:uracy)?"),
    ("loss", _LOSS),
    ("grad_norm", r"(?:global[ _])?(?:grad(?:ient)?[ _-]?norm|gnorm)"),
    ("learning_rate", r"lr|learning[ _]rate"),
    ("tokens_per_s", r"tok(?:ens)?(?:_per_|/)s(?:ec(?:ond)?)?|train_tokens_per_second"),
    ("mfu", r"mfu"),
    ("accuracy", r"acc(?:uracy)?|train[ _/]acc(?:uracy)?"),
)
_NAME = [(ours, re.compile(theirs, re.IGNORECASE)) for ours, theirs in _NAMES]
_NAMED = re.compile(
    r"(?<![\w/-])(?P<name>" + "|".join(f"(?:{theirs})" for _, theirs in _NAMES) + r")"
    r"(?:\s*[:=]\s*|\s+(?=[-+]?\d*\.\d|nan|inf|\d[\d.]*[e%]))"
    rf"(?:tensor\()?(?P<number>{_NUMBER})(?!\.?\d|,\d|\s*/)(?P<percent>%)?",
    re.IGNORECASE,
)
_RATE = re.compile(r"(?P<number>\d[\d,.]*)(?P<k>[kKM])? ?tok(?:ens)?/s(?:ec)?\b", re.IGNORECASE)
_UP = "\x1b[A"


def read_line(line: str) -> Telling | None:
    """What a piece of output says of training; None where it says nothing that is known.

    >>> read_line("step 10/100 loss=2.3").step
    10
    >>> read_line("loading data") is None
    True
    """
    if len(line) > _LONGEST or not any(sign in line for sign in _SIGNS):
        return None
    text = plain(line)
    for row in _ROWS:
        match = row.pattern.search(text) if row.sign in text else None
        found = row.read(match, text) if match is not None else None
        if found is None:
            continue
        if found.bar is not None and _UP in line:
            return _as_inner(found)
        return found
    return None


_LONGEST = 4000
_SIGNS = ("oss", "OSS", "step", "Step", "iter", "it/s", "s/it", "%|", "it [", "━", "checkpoint")
"""One of these is in every line that a row takes: most lines are passed over quickly."""


def named(name: str) -> str | None:
    """Our name of a number, for a name that scripts use.

    >>> named("lr"), named("train/loss"), named("val_loss"), named("reward")
    ('learning_rate', 'loss', 'eval_loss', None)
    """
    return next((ours for ours, theirs in _NAME if theirs.fullmatch(name)), None)


def _numbers(text: str) -> dict[str, float]:
    """Numbers behind names that we know, the first of each."""
    found: dict[str, float] = {}
    for match in _NAMED.finditer(text):
        ours = named(match["name"])
        value = _float(match["number"])
        if ours is None or value is None or (match["percent"] and "loss" in ours):
            continue  # "packet loss 0.5%"
        found.setdefault(ours, value / 100 if match["percent"] else value)
    rate = _RATE.search(text)
    value = _float(rate["number"]) if rate is not None else None
    if rate is not None and value is not None:
        scale = {"k": 1e3, "K": 1e3, "M": 1e6}.get(rate["k"] or "", 1.0)
        found.setdefault("tokens_per_s", value * scale)
    return found


def _float(text: object) -> float | None:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        return None
    try:
        return float(text.replace(",", "") if isinstance(text, str) else text)
    except (ValueError, OverflowError):  # OverflowError: a whole number of 400 digits
        return None


_MOST = 2**53
"""A larger number is no step; JSON's readers do not agree on it either."""


def _whole(text: str | None) -> int | None:
    number = _float(text)
    return int(number) if number is not None and abs(number) < _MOST else None


# Readers of rows: a match and its line -> what they say, or None.


def _megatron(match: re.Match[str], line: str) -> Telling | None:
    values: dict[str, float] = {}
    for part in line[match.end() :].split("|"):
        name, _, text = part.rpartition(":")
        ours, value = named(name.strip()), _float(text.strip())
        if name.strip() == "elapsed time per iteration (ms)" and value is not None:
            values["step_s"] = value / 1000
        elif ours is not None and value is not None:
            values[ours] = value
    return Telling(step=_whole(match["step"]), num_steps=_whole(match["total"]), values=values)


def _step_and_evaluation(match: re.Match[str], line: str) -> Telling | None:
    return _evaluation(match["step"], _float(match["loss"]))


def _evaluation(step: str, loss: float | None) -> Telling | None:
    return None if loss is None else Telling(step=_whole(step), values={"eval_loss": loss})


def _saved(match: re.Match[str], line: str) -> Telling | None:
    return Telling(step=_whole(match["step"]), checkpoint=match["path"])


def _titan(match: re.Match[str], line: str) -> Telling | None:
    values = _numbers(line[match.end("step") :])
    if match["validate"]:
        return _evaluation(match["step"], values.get("loss"))
    found = re.search(r"\btps:\s*([\d,]+)", line)
    rate = _float(found[1]) if found is not None else None
    if rate is not None:
        values["tokens_per_s_and_rank"] = rate
    return Telling(step=_whole(match["step"]), values=values) if values else None


def _deepspeed(match: re.Match[str], line: str) -> Telling | None:
    rate = _float(match["rate"])
    values = {} if rate is None else {"learning_rate": rate}
    return Telling(step=_whole(match["step"]), values=values)


def _dict(match: re.Match[str], line: str) -> Telling | None:
    """A dict or a JSON object of numbers, such as Hugging Face's Trainer prints."""
    text = match["dict"]
    try:
        read = json.loads(text) if '"' in text else ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None  # TypeError: a list for a name; MemoryError: too many brackets
    if not isinstance(read, dict) or "train_runtime" in read:  # the mean over all steps
        return None
    numbers = {str(name): _float(value) for name, value in read.items()}
    known = {name: value for name, value in numbers.items() if value is not None}
    step = next((known.pop(name) for name in _STEPS if name in known), None)
    values = {named(name) or name: value for name, value in known.items()}
    if not any(named(name) for name in known):
        return None
    is_step = step is not None and math.isfinite(step) and abs(step) < _MOST
    return Telling(step=int(step) if step is not None and is_step else None, values=values)


_STEPS = ("step", "global_step", "train/global_step", "iteration", "iter")


def _bar(match: re.Match[str], line: str) -> Telling | None:
    """tqdm, and so Lightning; a number behind a name in the bar's end is of its step."""
    values: dict[str, float] = {}
    for part in (match["rest"] or "").split(","):
        name, is_pair, text = part.strip().partition("=")
        value = _float(text)
        if is_pair and value is not None and name != "v_num":
            values[named(name) or name] = value
    bar = Bar(
        done=_whole(match["done"]) or 0,
        total=_whole(match["total"]),
        title=(match["title"] or "").strip().rstrip(":"),
        is_inner=False,
    )
    return Telling(bar=bar, values=values)


def _keras(match: re.Match[str], line: str) -> Telling | None:
    done, total = _whole(match["done"]) or 0, _whole(match["total"])
    bar = Bar(done=done, total=total, title="", is_inner=False)
    return Telling(bar=bar, values=_numbers(line))


def _rich(match: re.Match[str], line: str) -> Telling | None:
    """Lightning's bar where rich is installed, which draws it once, at the end; epochs from 0."""
    epoch, last, done, total = (_whole(match[n]) or 0 for n in ("epoch", "last", "done", "total"))
    return Telling(
        step=epoch * total + done,
        num_steps=(last + 1) * total,
        values=_numbers(line[match.end() :]),
    )


def _as_inner(found: Telling) -> Telling:
    assert found.bar is not None, "asked of bars only"
    bar = found.bar
    inner = Bar(done=bar.done, total=bar.total, title=bar.title, is_inner=True)
    return Telling(bar=inner, values=found.values)


def _imagenet(match: re.Match[str], line: str) -> Telling | None:
    epoch, done, total = (_whole(match[name]) or 0 for name in ("epoch", "done", "total"))
    values = _numbers(line)
    if "loss" not in values or _STARTS_EVALUATION.match(line):
        return None
    return Telling(step=epoch * total + done, values=values)


def _plain(match: re.Match[str], line: str) -> Telling | None:
    """Steps, epochs and numbers behind their names, in any order."""
    values = _numbers(line)
    if _STARTS_EVALUATION.match(line) and "loss" in values:
        values.setdefault("eval_loss", values.pop("loss"))
        if "accuracy" in values:
            values.setdefault("eval_accuracy", values.pop("accuracy"))
    if "eval_loss" in values and "loss" not in values and "accuracy" in values:
        values.setdefault("eval_accuracy", values.pop("accuracy"))
    if not values.keys() & {"loss", "eval_loss"}:
        return None
    step, epoch = _STEP.search(line), _EPOCH.search(line)
    return Telling(
        step=_whole(step["step"]) if step is not None else None,
        num_steps=_whole(step["total"]) if step is not None else None,
        epoch=_whole(epoch["epoch"]) if epoch is not None else None,
        num_epochs=_whole(epoch["total"]) if epoch is not None else None,
        of_epoch=step is not None and step[0][:5].lower() == "batch",
        values=values,
    )


_STEP = re.compile(
    r"\b(?:global[_ ]?step|step|iteration|iter|it|batch)s?\b\s*[:=#]?\s*[\[(]?\s*(?P<step>\d[\d,]*)"
    r"(?:\s*(?:/|of)\s*(?P<total>\d[\d,]*))?",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    r"\bepoch\b\s*[:=#]?\s*[\[(]?\s*(?P<epoch>\d+)(?![\d.]*\.\d)(?:\s*(?:/|of)\s*(?P<total>\d+))?",
    re.IGNORECASE,
)
_STARTS_EVALUATION = re.compile(rf"\W*(?:\[[^\]]*\]\s*)*{_EVALUATION}\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Row:
    """How somebody prints: a row of `training_lines.toml`."""

    sign: str
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str], str], Telling | None]


_READ: Mapping[str, Callable[[re.Match[str], str], Telling | None]] = {
    "megatron": _megatron,
    "step_and_evaluation": _step_and_evaluation,
    "saved": _saved,
    "titan": _titan,
    "deepspeed": _deepspeed,
    "bar": _bar,
    "rich": _rich,
    "keras": _keras,
    "dict": _dict,
    "imagenet": _imagenet,
    "plain": _plain,
}
_ROWS = [
    _Row(row["sign"], re.compile(row["pattern"].replace("NUMBER", _NUMBER)), _READ[row["read"]])
    for row in read_shipped("training_lines.toml").values()
]
