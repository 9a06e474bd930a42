"""Run a factory without its numbers: its tensors have shapes and no memory, and what is done to
them is written down.

Tensors that are made empty, filled or drawn are deferred. What is made of values (`arange`,
`linspace`, `torch.tensor`, a file) is real, and so is all that is computed from that alone, so a
factory may look at it. Everything deferred says that it is on the CPU.

Leaves out: looking at deferred values, other than one number that nothing random is in; reading
back or setting the state of torch's generator in the middle; devices other than the CPU. Those are
`Undeferrable`.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn

from paceline.runtime import _torch_private as private
from paceline.runtime._torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
    tree_map_only,
)
from paceline.runtime.initial.program import Operation, Program, Target, View

aten = torch.ops.aten

_EMPTY = frozenset(
    {
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)
_FILLED = frozenset(
    {
        aten.full,
        aten.full_like,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones,
        aten.ones_like,
        aten.zeros,
        aten.zeros_like,
    }
)
"""What makes room for a parameter; everything else that is given no deferred tensor is real."""

_REFUSED = frozenset({aten.set_, aten.resize_, aten.resize_as_})
"""What gives a tensor other memory behind its back."""


class Undeferrable(Exception):
    """This factory does something that cannot be written down and repeated later."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the tensors that a factory makes are deferred, and `program` says how they come to
    their values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program(_get_rng_state())
        self.refusal: str | None = None
        """Why this factory cannot be deferred, where it cannot."""

        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._numbers: dict[int, int] = {}
        self._storages: list[UntypedStorage] = []  # alive, so that no other has their address
        self._read: list[tuple[Tensor, int]] = []
        self._state = self.program.start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        leaves = tree_leaves((args, given))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        has_deferred = sum(map(self._adopt, leaves)) > 0  # every one is adopted
        if not has_deferred and not self._begins_deferred(func, args, given, is_random):
            return func(*args, **given)
        if is_random and given.get("generator") is not None:
            self.refuse("draws with a generator of its own into a parameter")
        if func.overloadpacket in _REFUSED:
            self.refuse(f"calls {func}")
        if func is private.ITEM:
            return self._number(args[0])
        return self._defer(func, args, given, is_random)

    def _adopt(self, value: object) -> bool:
        """Whether it is a deferred tensor. A deep copy of one has a copy of our mode, which would
        take it for a stranger's and lose what shares its memory."""
        if not is_deferred(value):
            return False
        value.fake_mode = self._fake  # type: ignore[attr-defined]
        return True

    def refuse(self, why: str) -> None:
        """This factory cannot be deferred, even if it catches what is raised here."""
        self.refusal = self.refusal or why
        raise Undeferrable(why)

    def view_of(self, tensor: Tensor) -> View:
        """Where a deferred tensor lies."""
        key = private.storage_key(tensor.untyped_storage())
        if key not in self._numbers:
            raise Undeferrable("has a tensor whose making was not seen")
        return View(
            self._numbers[key],
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def finish(self) -> None:
        """After the factory: what real tensors it has used must be as they were used.

        Raises:
            Undeferrable: They are not, or it was refused on the way.
        """
        if self.refusal is not None:
            raise Undeferrable(self.refusal)
        if any(private.version_of(tensor) != version for tensor, version in self._read):
            raise Undeferrable("changes a tensor after copying it into a parameter")
        state = _get_rng_state()
        if not torch.equal(state, self._state):
            self.program.end = state

    def is_held(self) -> bool:
        """Whether something still holds a deferred tensor: storages are in use beside here."""
        if not any(map(private.is_used_elsewhere, self._storages)):
            return False
        gc.collect()
        return any(map(private.is_used_elsewhere, self._storages))

    def add_draw(self, function: Any, tensor: Tensor, *args: Any) -> Tensor:
        """Write down a function that fills a deferred tensor with random numbers it looks at."""
        view = self.view_of(tensor)
        self._add(function, (view, *args), {}, (None,), frozenset({view.storage}), is_random=True)
        return tensor

    def _add(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        makes: tuple[View | None, ...],
        writes: frozenset[int],
        *,
        is_random: bool,
    ) -> None:
        state = self._set_state() if is_random else None
        operation = Operation(
            function=function,
            args=args,
            kwargs=kwargs,
            makes=makes,
            writes=writes,
            is_random=is_random,
            state=state,
        )
        self.program.operations.append(operation)

    def _begins_deferred(
        self, func: Any, args: Any, kwargs: dict[str, Any], is_random: bool
    ) -> bool:
        """Whether an operation on real tensors, or on none, makes a deferred one."""
        packet = func.overloadpacket
        if not (is_random or packet in _EMPTY or packet in _FILLED):
            return False
        device = _device(args, kwargs)
        if device.type == "meta" or (is_random and kwargs.get("generator") is not None):
            return False
        if device.type != "cpu":
            self.refuse(f"makes a tensor on {device}")
        if is_random and _written(func, args, kwargs):
            self.refuse("draws into a tensor that was made of values")
        return True

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any], is_random: bool) -> Any:
        written = _written(func, args, kwargs)
        if any(not is_deferred(each) for each in written):
            self.refuse("writes values that are not known yet into a tensor that was made of some")
        views = tree_map_only(Tensor, self._argument, (args, kwargs))
        result = self._pretend(func, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs = tuple(self._new(each) for each in made)
        if (
            private.returns_alias(func)
            and any(outputs)
            and all(map(is_deferred, tree_leaves(args)[:1]))
        ):
            self.refuse(f"loses what shares memory in {func}")
        if func.overloadpacket in _EMPTY or not (written or any(outputs)):
            return result
        changed = frozenset(self.view_of(each).storage for each in written)
        self._add(func, views[0], views[1], outputs, changed, is_random=is_random)
        return result

    def _pretend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            with self._fake:
                return func(*args, **kwargs)
        except Exception as error:
            self.refusal = self.refusal or f"needs values in {func}: {type(error).__name__}"
            raise
        finally:
            private.forget_tensors(self._fake)

    def _argument(self, tensor: Tensor) -> View | Tensor:
        if is_deferred(tensor):
            return self.view_of(tensor)
        if tensor.device.type not in ("cpu", "meta"):
            self.refuse(f"uses a tensor on {tensor.device}")
        self._read.append((tensor, private.version_of(tensor)))
        return tensor

    def _new(self, tensor: Tensor) -> View | None:
        """Where a result lies, if that is a storage not seen before."""
        storage = tensor.untyped_storage()
        if tensor.is_meta or private.storage_key(storage) in self._numbers:
            return None
        number = len(self._storages)
        self._numbers[private.storage_key(storage)] = number
        self._storages.append(storage)
        self.program.sizes[number] = storage.nbytes()
        return self.view_of(tensor)

    def _set_state(self) -> Tensor | None:
        """The generator's state, where the factory has set it since the last draw."""
        state = _get_rng_state()
        if torch.equal(state, self._state):
            return None
        self._state = state
        return state

    def _number(self, tensor: Tensor) -> Any:
        found: list[Tensor] = []
        target = Target(self.view_of(tensor), lambda _, value: found.append(value))
        try:
            with private.leave_modes():
                self.program.run([target], draws=False)
        except ValueError as error:
            self.refuse(f"looks at {error}")
        return found[0].item()


_get_rng_state = torch.get_rng_state


@contextmanager
def recording() -> Iterator[Recorder]:
    """Around a factory."""
    recorder = Recorder()

    def get_rng_state() -> Tensor:
        if any(each.is_random for each in recorder.program.operations):
            recorder.refuse("reads the state of torch's generator after drawing")
        return _get_rng_state()

    def trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_deferred(tensor) or kwargs.get("generator") is not None:
            drawn: Tensor = private.TRUNC_NORMAL(tensor, *args, **kwargs)
            return drawn
        return recorder.add_draw(private.TRUNC_NORMAL, tensor, *args)

    with (
        warnings.catch_warnings(),
        patch.object(torch, "get_rng_state", get_rng_state),
        patch.object(nn.init, private.TRUNC_NORMAL_NAME, trunc_normal),
        patch.object(torch.random, "get_rng_state", get_rng_state),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with recorder:
            yield recorder


def is_deferred(value: object) -> bool:
    return isinstance(value, FakeTensor) and value.device.type != "meta"


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    leaves = tree_leaves(private.written_arguments(func, args, kwargs))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
