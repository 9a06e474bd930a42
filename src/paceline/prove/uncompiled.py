"""Torch without its compiler, which a dry run never calls and which takes longest to import.

Optimizers, FSDP2 and pipelines import `torch._dynamo` only to tell it what not to compile. Here a
module that agrees to everything stands in its place; whoever asks it for more gets the real one.

Leaves out: processes that have the compiler already.
"""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

_NAME = "torch._dynamo"


def leave_out_compiler() -> None:
    """Put the stand-in in place. Call before torch is imported, in a process that only proves."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(_NAME)
        sys.meta_path.insert(0, _RealParts())


def _disable(function: Any = None, *_: Any, **__: Any) -> Any:
    """The function itself, or a decorator that returns it: nothing is ever compiled."""
    return function if function is not None else _disable


class _StandIn(ModuleType):
    """What torch's eager code asks of its compiler (read in 2.13: `optim`, `utils.checkpoint`,
    `nn.parallel.distributed`, `distributed.fsdp`, `distributed.pipelining`, `distributed_c10d`)."""

    disable = staticmethod(_disable)

    class OptimizedModule:
        """No module is one."""

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """There is no graph."""

    class config:
        """Settings that are read in eager code."""

        error_on_nested_fx_trace = True

        @staticmethod
        def patch(*_: Any, **__: Any) -> AbstractContextManager[None]:
            return nullcontext()

    trace_rules = SimpleNamespace(
        clear_lru_cache=lambda: None,
        LEGACY_MOD_INLINELIST=set[str](),
        get_legacy_mod_inlinelist=SimpleNamespace(cache_clear=lambda: None),
    )
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """Anything else is the real compiler's."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real_compiler(), name)


def _real_compiler() -> ModuleType:
    """The package itself, from now on in the place of its stand-in."""
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)


class _RealParts(MetaPathFinder, Loader):
    """Finds `torch._dynamo.x` by letting the real package take its place."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_ours = isinstance(sys.modules.get(_NAME), _StandIn)
        return ModuleSpec(fullname, self) if is_ours and fullname.startswith(f"{_NAME}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _real_compiler()
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is loaded already."""
