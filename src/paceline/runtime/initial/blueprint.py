"""A person's model without the numbers of its parameters, and where those come from.

Its parameters are on meta. Its buffers, and other tensors that its modules keep, are there: they
are small, and layouts look at them. A factory that cannot be recorded is run as it is, and its
whole model is in memory until its parts are where they belong: `why_whole` says why.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import reason_of
from paceline.runtime._torch_private import buffers_of, parameters_of, tree_leaves, tree_map_only
from paceline.runtime.determinism import seed_everything
from paceline.runtime.initial.program import Program, Target, View
from paceline.runtime.initial.record import Recorder, Undeferrable, is_deferred, recording
from paceline.runtime.strategy.ways.peft import is_peft, mark_frozen

_KEPT_BYTES = 64 << 20
"""Values of parameters, as from a file, that wait in memory until they are needed. More than these
are read again then, so that a warm spare holds no model. A guess."""

_LOOKED_AT = 1024
"""Values of each tensor that a digest looks at. A guess: another file, type or seed changes all."""

MakeModel = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Where the parameters' numbers come from."""

    sources: dict[str, View | Tensor]
    """By name: where it lies in the program, or its values."""

    program: Program | None = None

    @property
    def value_bytes(self) -> int:
        """Bytes of the values that are in memory."""
        values = {id(s): s.nbytes for s in self.sources.values() if isinstance(s, Tensor)}
        return sum(values.values())

    def digest(self) -> str:
        """Equal on two ranks if what they draw is; values are not looked at."""
        return "" if self.program is None else self.program.digest()

    def digest_of_values(self) -> str:
        """Equal for equal names, shapes and some of the values: those of large models, as from a
        file, would take seconds."""
        found = hashlib.blake2b(digest_size=16)
        for name, source in self.sources.items():
            found.update(f"{name} {tuple(source.shape)}".encode())
            if isinstance(source, Tensor):
                flat = source.detach().reshape(-1)
                some = flat[:: max(1, len(flat) // _LOOKED_AT)].contiguous()
                found.update(some.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    model: nn.Module
    numbers: Numbers
    why_whole: str | None = None


class Blueprint:
    """What a factory builds, but for its numbers. Every generator is seeded for it."""

    def __init__(self, make_model: MakeModel, seed: int) -> None:
        self._make_model = make_model
        self._seed = seed
        built = _build(make_model, seed)
        if is_peft(built.model):
            mark_frozen(built.model)
        self.why_whole = built.why_whole
        """Why the whole model is in memory while it is built; None where it is not."""

        self.names = frozenset(built.numbers.sources)
        """Every name of every parameter."""

        self._model: nn.Module | None = built.model
        self._copy = _copy_of(built.model)
        self._numbers = built.numbers if built.numbers.value_bytes <= _KEPT_BYTES else None

    @property
    def has_model(self) -> bool:
        """Whether there is one to take. It is not where it cannot be copied, and was taken."""
        return self._model is not None or self._copy is not None

    def take_model(self) -> nn.Module:
        """A model with its parameters on meta, for the caller to change."""
        model, self._model = self._model, None
        if model is None:
            assert self._copy is not None, "it was taken, and cannot be copied"
            return copy.deepcopy(self._copy)
        return model

    def take_numbers(self, *, whole: bool = False) -> Numbers:
        """Where the numbers come from. Values among them are the caller's to free.

        Args:
            whole: Run the factory as it is, and take the values of all parameters.
        """
        if whole:
            return _build_whole(self._make_model, self._seed, "").numbers
        numbers = self._numbers or _build(self._make_model, self._seed).numbers
        self._numbers = numbers if numbers.value_bytes == 0 else None
        return numbers


class Blueprints:
    """A worker's blueprint from generation to generation."""

    def __init__(self) -> None:
        self._kept: Blueprint | None = None
        self._generation: int | None = None
        self._num_models = 0

    def of(self, make_model: MakeModel, seed: int, generation: int) -> Blueprint:
        """The blueprint of a factory; the one kept from an earlier generation, where a training
        function builds one model and it can be copied."""
        if generation != self._generation:
            self._generation = generation
            is_only, self._num_models = self._num_models <= 1, 0
            if self._kept is not None and is_only and self._kept.has_model:
                self._num_models = 1
                return self._kept
        self._num_models += 1
        self._kept = Blueprint(make_model, seed)
        return self._kept


def why_whole(make_model: MakeModel) -> str | None:
    """Why building a model needs all of it in the host's memory of every rank; None where each rank
    makes its own part. Numbers are not drawn."""
    built = _try_without_numbers(make_model)
    if isinstance(built, str):
        return built
    size = built.numbers.value_bytes
    return f"makes {size} bytes of its parameters of values" if size > _KEPT_BYTES else None


def _build(make_model: MakeModel, seed: int) -> _Built:
    seed_everything(seed)
    built = _try_without_numbers(make_model)
    return built if not isinstance(built, str) else _build_whole(make_model, seed, built)


def _try_without_numbers(make_model: MakeModel) -> _Built | str:
    refusal: str | None = None
    try:
        with recording() as recorder:
            try:
                model = make_model()
            finally:
                refusal = recorder.refusal
        recorder.finish()
        return _without_numbers(model, recorder)
    except Undeferrable as error:
        return refusal or str(error)
    except Exception as error:  # noqa: BLE001 - whatever a person's code raises that has no values
        return refusal or f"raises without its numbers: {reason_of(error, most=200)}"


def _build_whole(make_model: MakeModel, seed: int, why: str) -> _Built:
    seed_everything(seed)
    model = make_model()
    named = dict(model.named_parameters(remove_duplicate=False))
    sources: dict[str, View | Tensor] = {name: each.detach() for name, each in named.items()}
    _take_parameters_off(model)
    return _Built(model=model, numbers=Numbers(sources=sources), why_whole=why)


def _without_numbers(model: nn.Module, recorder: Recorder) -> _Built:
    sources = _sources(model, recorder)
    lie_in = {source.storage for source in sources.values() if isinstance(source, View)}
    _take_parameters_off(model)
    _give_values(model, recorder, lie_in)
    if recorder.is_held():
        raise Undeferrable("keeps a tensor where it is not found: in no module")
    return _Built(model=model, numbers=Numbers(sources=sources, program=recorder.program))


def _sources(model: nn.Module, recorder: Recorder) -> dict[str, View | Tensor]:
    sources: dict[str, View | Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.device.type != "cpu":
            raise Undeferrable(f"puts {name} on {parameter.device}")
        sources[name] = (
            recorder.view_of(parameter) if is_deferred(parameter) else parameter.detach()
        )
    return sources


def _take_parameters_off(model: nn.Module) -> None:
    """Put parameters on meta in their place, the same one in all its places."""
    taken: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None and id(parameter) not in taken:
                taken[id(parameter)] = parameter, _on_meta(parameter)
            if parameter is not None:
                parameters_of(module)[name] = taken[id(parameter)][1]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
    )
    new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if not is_deferred(parameter):  # those have much of their own there
        new.__dict__.update(parameter.__dict__)
    return new


def _give_values(model: nn.Module, recorder: Recorder, lie_in: set[int]) -> None:
    found: dict[int, tuple[Tensor, View]] = {}
    values: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if is_deferred(tensor):
            view = recorder.view_of(tensor)
            if view.storage in lie_in:
                raise Undeferrable("keeps a parameter's memory under another name")
            found[id(tensor)] = tensor, view
        return tensor

    def value(tensor: Tensor) -> Tensor:
        return values.get(id(tensor), tensor)

    for each in (note, value):
        for module in model.modules():
            for places in (buffers_of(module), vars(module)):
                for name, held in places.items():
                    if any(isinstance(leaf, Tensor) for leaf in _leaves(name, held)):
                        places[name] = tree_map_only(Tensor, each, held)
        if each is note:
            values.update(_values(recorder.program, found))
    found.clear()


def _leaves(name: str, held: Any) -> list[Any]:
    is_modules_own = name in ("_parameters", "_buffers", "_modules")
    return [] if is_modules_own else tree_leaves(held)


def _values(program: Program, found: dict[int, tuple[Tensor, View]]) -> dict[int, Tensor]:
    made: dict[int, Tensor] = {}

    def taker(key: int, view: View) -> Target:
        def put(start: tuple[int, ...], block: Tensor) -> None:
            if block.shape == view.shape:
                made[key] = block
                return
            whole = made.setdefault(key, torch.empty(view.shape, dtype=view.dtype))
            place = tuple(slice(s, s + n) for s, n in zip(start, block.shape, strict=True))
            whole[place].copy_(block)

        return Target(view, put)

    targets = [taker(key, view) for key, (_, view) in found.items()]
    before = torch.get_rng_state()
    try:
        program.run(targets, draws=False)
    except ValueError:  # a table that is drawn at random: in its order among the parameters
        program.run(targets)
        torch.set_rng_state(before)
    return {
        key: made.get(key, torch.empty(view.shape, dtype=view.dtype))
        for key, (_, view) in found.items()
    }


def _copy_of(model: nn.Module) -> nn.Module | None:
    """A deep copy; None where it would have something of the original: functions are not copied,
    nor is what they have hold of."""
    for module in model.modules():
        for held in vars(module).values():
            if any(_holds(leaf) for leaf in tree_leaves(held)):
                return None
    try:
        return copy.deepcopy(model)
    except Exception:  # noqa: BLE001 - whatever a person's module raises
        return None


def _holds(value: Any) -> bool:
    if isinstance(value, partial):
        return True
    return isinstance(value, FunctionType) and value.__closure__ is not None
