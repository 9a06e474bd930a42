"""The job's model as a factory: what the built-in trainer, `prove` and `verify` all build.

Leaves out: splitting it, and drawing its weights anew after it was built on the meta device
(`Decoder.reset_parameters`, `huggingface.reset_hf`).
"""

import importlib
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.errors import JobError, reason_of
from paceline.job import Job
from paceline.job.data_rules import objective_of
from paceline.job.model import how_to_try
from paceline.job.pretrained import find_pretrained, loads_weights
from paceline.profile import DecoderShape, resolve_config, resolve_profile
from paceline.profile.adapter import adaptation_of
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import as_plain_model, build_hf, is_hf
from paceline.runtime.pretrained import FromPretrained
from paceline.runtime.strategy.adapter.place import add_adapters


def make_model(
    job: Job, decoder: DecoderShape | None, precision: str = "fp32"
) -> Callable[[], nn.Module]:
    """A function that builds the job's whole model on torch's current device, in float32.

    Its weights are drawn from torch's generator, alike on every rank that seeded it alike; under
    `with torch.device("meta")` it takes no memory. With `model.pretrained` it is a
    `FromPretrained`: `session.build` then reads the weights. The built-in decoder and every
    Hugging Face model, a factory's too, turn `tokens_BS` into `logits_BSV`; another module of the
    person's own takes what it takes.

    Args:
        precision: The plan's. Only the frozen weights beside adapters follow it.

    The function raises:
        JobError: `R010`, `R013`: transformers is missing, or cannot build it. `J009`, `M010`: the
            factory cannot be imported, raises, returns no module, or reaches for CUDA.
    """
    make = _model_alone(job, decoder)
    spec = job.spec.train.adapter
    if spec is None or job.spec.program is not None:
        return make
    adapter = resolve_profile(job).adapter
    assert adapter is not None, "the profile has what the job asks for"
    asked = adaptation_of(adapter, spec, precision=precision, seed=job.spec.train.seed)
    if isinstance(make, FromPretrained):
        build = make.build
        return FromPretrained(lambda: add_adapters(build(), asked), make.found)
    return lambda: add_adapters(make(), asked)


def _model_alone(job: Job, decoder: DecoderShape | None) -> Callable[[], nn.Module]:
    if job.spec.model.factory is not None:
        return partial(
            build_own, job.folder, job.spec.model.factory, where=job.where("model.factory")
        )
    build: Callable[[], nn.Module]
    if decoder is not None:
        build = partial(Decoder, decoder, job.spec.data.seq_len)
    else:
        asked = resolve_config(job)
        assert asked is not None, "a model without a decoder's shape or a factory has a config"
        classifies = objective_of(job.spec) == "classification"
        given: Any = {"source": asked.source, "where": asked.where, "classifies": classifies}
        build = partial(build_hf, asked.config, **given)
    found = find_pretrained(job) if loads_weights(job) else None
    return build if found is None else FromPretrained(build, found)


def import_named(folder: Path, name: str) -> Any:
    """What a person's `module:function` names, imported from the job's folder.

    Raises:
        Exception: Whatever the import raises; `AttributeError` when the module has no such name.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def build_factory(factory: Callable[[], Any]) -> nn.Module:
    """The module of a factory that was imported.

    Raises:
        TypeError: It returned something else.
        Exception: Whatever it raises.
    """
    built = factory()
    if not isinstance(built, nn.Module):
        raise TypeError(f"it returned a {type(built).__name__}, not an nn.Module")
    return as_plain_model(built) if is_hf(built) else built


def build_own(folder: Path, name: str, *, where: str = "model.factory") -> nn.Module:
    """The model that a person's `module:function` builds.

    Raises:
        JobError: It cannot be imported, raises or returns no module (`J009`), or reaches for CUDA
            (`M010`).
    """
    own = _Own(folder, name, where)
    had_cuda = _has_cuda()
    try:
        factory = import_named(folder, name)
    except (Exception, SystemExit) as error:  # whatever a person's module raises
        raise _problem(own, "when its module is imported", error) from error
    if _has_cuda() and not had_cuda:
        raise _reaches_for_cuda(own, "when its module is imported", "it starts CUDA there")
    try:
        return build_factory(factory)
    except JobError:
        raise
    except (Exception, SystemExit) as error:  # whatever a person's factory raises
        raise _problem(own, "when it builds the model", error) from error


class _Own(NamedTuple):
    folder: Path
    name: str
    where: str


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _problem(own: _Own, moment: str, error: BaseException) -> JobError:
    told = f"{reason_of(error)}{_place(own.folder, error)}"
    if "CUDA" in str(error) or "NVIDIA" in str(error):
        return _reaches_for_cuda(own, moment, told)
    return JobError.of(
        code="J009",
        what=f"the model {own.name} could not be built: {moment}, {told}",
        where=own.where,
        fix=how_to_try(own.name, own.folder),
    )


def _reaches_for_cuda(own: _Own, moment: str, told: str) -> JobError:
    return JobError.of(
        code="M010",
        what=f"the model {own.name} reaches for CUDA {moment}: {told}",
        where=own.where,
        fix="build it without naming a device, and leave CUDA to the training function: every "
        "rank moves the model to its own device",
    )


def _place(folder: Path, error: BaseException) -> str:
    """The innermost line of the person's own code, ` (my_module.py line 12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
    return f" ({Path(own[-1].filename).name} line {own[-1].lineno})" if own else ""
