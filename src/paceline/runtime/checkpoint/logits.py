"""Compare an exported folder with the run's own model, in a process of its own.

    python -m paceline.runtime.checkpoint.logits < request.json

The run's model is built and filled from the checkpoint as the run itself would; the folder is
loaded by transformers, adapters by peft. Both compute the logits of the same samples on the CPU in
float32, one model in memory at a time.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError, Problem, reason_of
from paceline.job import Job
from paceline.job.data_rules import is_prepared, objective_of
from paceline.prepare import find_prepared
from paceline.record.conversion import Comparison, LogitsCheck
from paceline.record.run import RunFolder
from paceline.runtime.answer import answer
from paceline.runtime.checkpoint.own_model import own_model
from paceline.runtime.data import Samples, load_prepared, load_text
from paceline.runtime.huggingface import as_plain_model

_SAMPLES = 8
_MOST_TOKENS = 512
"""Tokens of a sample that are read. A guess: rotary tables and masks show by then, and a CPU
computes them."""

_POSITIONS = 64
"""Last places of a sample whose logits are compared: each follows from all tokens before it, and
all logits of 512 places of 128,000 tokens would take 2 GB."""


_LOGITS_BYTES = 1 << 28
"""Logits of the samples that are computed at once. A guess: small beside a model worth it."""


class _NotMadeError(Exception):
    """Why the check cannot be made."""


def compare(asked: Comparison) -> LogitsCheck:
    """How far the exported model is from the run's."""
    try:
        job = RunFolder(Path(asked.run)).job()
        load = _loader(asked, classifies=objective_of(job.spec) == "classification")
        own = own_model(RunFolder(Path(asked.run)), Path(asked.checkpoint))
        vocab = _vocab(own)
        tokens_BS, kind = _tokens(job, vocab)
        ours = _logits(own, tokens_BS, vocab)
        rounding = None
        if asked.dtype not in (None, "float32"):
            _round(own, getattr(torch, str(asked.dtype)))
            exact, ours = ours, _logits(own, tokens_BS, vocab)
            rounding = float((ours - exact).abs().max())
    except _NotMadeError as error:
        return LogitsCheck(not_made=str(error))
    except PacelineError as error:
        return LogitsCheck(not_made=error.problems[0].what)
    except Exception as error:  # noqa: BLE001 - the run's model, not the folder: nothing is known
        return LogitsCheck(not_made=f"the run's model could not be built: {reason_of(error)}")
    del own
    try:
        theirs = _logits(load(), tokens_BS, vocab)
    except Exception as error:  # noqa: BLE001 - whatever the library says of the folder is shown
        return LogitsCheck(problem=_problem(asked, f"does not load: {reason_of(error)}"))
    return _judge(asked, ours, theirs, kind, rounding)


def _judge(
    asked: Comparison, ours: Tensor, theirs: Tensor, kind: str, rounding: float | None
) -> LogitsCheck:
    largest = float(ours.abs().max())
    found = LogitsCheck(
        samples=ours.shape[0],
        kind=kind,
        positions=ours.shape[1],
        largest_logit=largest,
        largest_rounding=rounding,
        versions=_versions("torch", "transformers", *(["peft"] if asked.base else [])),
    )
    vocab = min(ours.shape[-1], theirs.shape[-1])
    difference = float((ours[..., :vocab] - theirs[..., :vocab]).abs().max())
    chosen = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    found = replace(found, largest_difference=difference, same_choice=float(chosen))
    if ours.shape != theirs.shape:
        what = f"has {theirs.shape[-1]} logits for a token, and the run's model {ours.shape[-1]}"
    elif not difference <= asked.tolerance * max(largest, 1e-6):  # NaN is not
        what = f"computes other logits than the run's model: they differ by {difference:.4g}, "
        what += f"the largest is {largest:.4g}"
    else:
        return found
    return replace(found, problem=_problem(asked, what))


def _problem(asked: Comparison, what: str) -> Problem:
    return Problem(
        code="C013",
        what=f"what was exported {what}",
        where=asked.checkpoint,
        fix="report this, with the job file; --no-check writes the folder all the same",
    )


def _loader(asked: Comparison, *, classifies: bool) -> Callable[[], nn.Module]:
    """How the folder is loaded.

    Raises:
        _NotMadeError: A package is missing.
    """
    names = ("transformers", "peft") if asked.base is not None else ("transformers",)
    found: list[Any] = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            raise _NotMadeError(f"{name} cannot be imported ({reason_of(error)})") from None
    transformers = found[0]

    def load() -> nn.Module:
        source = asked.base or asked.folder
        kind = "SequenceClassification" if classifies else "CausalLM"
        cls = getattr(transformers, f"AutoModelFor{kind}")
        model: nn.Module = cls.from_pretrained(source, dtype=torch.float32)
        if classifies:
            config: Any = model.config
            if config.pad_token_id is None:  # asked for of more than one sample; none is padded
                config.pad_token_id = 0
            as_plain_model(model)  # which answers for every token
        if asked.base is not None:
            model = found[1].PeftModel.from_pretrained(model, asked.folder)
        return model

    return load


def _vocab(model: nn.Module) -> int:
    with torch.no_grad():
        return int(model.eval()(torch.zeros(1, 1, dtype=torch.long)).shape[-1])


def _tokens(job: Job, vocab: int) -> tuple[Tensor, str]:
    """Inputs of some samples, spread over the held-out ones; of training where none are held out,
    and random ones where the data are not there any more."""
    try:
        train, held_out = _data(job)
    except PacelineError:
        size = min(job.spec.data.seq_len, _MOST_TOKENS)
        generator = torch.Generator().manual_seed(job.spec.train.seed)
        return torch.randint(vocab, (_SAMPLES, size), generator=generator), "random tokens"
    data, kind = train, "training"
    if held_out is not None and held_out.num_samples:
        data, kind = held_out, "held-out"
    wanted = min(_SAMPLES, data.num_samples)
    ids = np.linspace(0, data.num_samples - 1, wanted).round().astype(np.int64)
    inputs_BS, *_ = data.samples(ids)
    return inputs_BS[:, :_MOST_TOKENS], kind


def _data(job: Job) -> tuple[Samples, Samples | None]:
    if not is_prepared(job):
        return load_text(job)
    folder = find_prepared(job)
    if folder is None:
        raise PacelineError
    return load_prepared(folder)


@torch.no_grad()
def _logits(model: nn.Module, tokens_BS: Tensor, vocab: int) -> Tensor:
    model.eval()
    rows = []
    at_once = max(1, _LOGITS_BYTES // (4 * vocab * tokens_BS.shape[1]))
    for some_BS in torch.split(tokens_BS, at_once):
        told: Any = model(some_BS)
        logits_BSV: Tensor = getattr(told, "logits", told)
        rows.append(logits_BSV[:, -_POSITIONS:].float().clone())
    return torch.cat(rows)


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def _versions(*names: str) -> dict[str, str]:
    return {name: str(importlib.import_module(name).__version__) for name in names}


if __name__ == "__main__":
    answer(Comparison, compare)
