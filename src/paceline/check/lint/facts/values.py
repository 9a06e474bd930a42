"""What a name of a program may hold, as far as reading the program can tell.

A `Value` is made by reading, never by running. It says where it comes from (`sources`), what it is
(`instance`, `kind`), and on what it depends that may differ between ranks (`taints`).
"""

import ast
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        return False


UNKNOWN: Any = _Unknown()
"""A constant that reading does not give. False, so that `if value.const` reads well."""

RANK = "rank"
"""Depends on which rank runs it: `get_rank()`, `LOCAL_RANK`, `is_main_process`."""

DATA = "data"
"""Depends on this rank's own batches, its loss, its metrics."""

TIME = "time"
"""Depends on this rank's clock."""

ALIKE = "alike"
"""Read by every rank from the same samples: a validation loader without a sampler. Harmless."""

DIVERGENT = frozenset({RANK, DATA, TIME})


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """One thing that a name may hold. Equal only to itself."""

    name: str | None = None
    """Its qualified name when it was imported: `torch.nn.Linear`."""

    file: str | None = None
    """For an import of a file that is linted too: its path; of a name in it, with `member`."""

    member: str | None = None
    const: Any = UNKNOWN
    """The literal it is known to be."""

    default: Any = UNKNOWN
    """What it is unless somebody says otherwise: an argparse default, a parameter's default."""

    instance: str | None = None
    """Qualified name of the class, or function, whose call made it: `torch.optim.AdamW`."""

    kind: str | None = None
    """model, optimizer, scheduler, loader, sampler, dataset, scaler, counter, output, batch ..."""

    taints: frozenset[str] = frozenset()
    main: bool | None = None
    """For a condition: True where it holds on the main process alone, False on all others."""

    alone: bool | None = None
    """For a condition: True where it holds only in a run of one process, False in one of many."""

    settled: bool = False
    """For a condition whose literal is known: it stays so throughout a call of its function."""

    node: ast.AST | None = None
    call: Any = None
    """The `Call` that made it."""

    receiver: "Value | None" = None
    """The value that it is an attribute or method of."""

    attribute: str | None = None
    fields: dict[str, "Value"] = field(default_factory=dict)
    items: "list[Value] | None" = None
    entries: "dict[str, Value] | None" = None
    """Entries of a dict literal with constant keys."""

    options: "tuple[Value, ...]" = ()
    """It may be any of these: two branches assigned it."""

    test: "Value | None" = None
    """The condition that chose among `options`, first for true."""

    function: Any = None
    """One of the file's own functions."""

    own_class: Any = None
    of_class: Any = None
    """The file's own class that it is an instance of."""

    wrapper: str | None = None
    """For a wrapped model: ddp, fsdp1, fsdp2, dp, deepspeed, accelerate, fabric ..."""

    inner: "Value | None" = None
    element_of: "Value | None" = None
    sources: "tuple[Value, ...]" = ()
    """What it was computed from."""

    operation: tuple[Any, ...] | None = None
    """(sign, operand ...) of arithmetic, comparisons and `and`, `or`, `not`."""

    label: str = ""
    """As the program writes it: `args.local_rank`."""

    def __repr__(self) -> str:
        what = self.name or self.instance or self.kind or self.label or repr(self.const)
        return f"<{what} {sorted(self.taints)}>" if self.taints else f"<{what}>"

    def any(self) -> "Iterator[Value]":
        """Itself, or everything that it may be."""
        if not self.options:
            yield self
        for option in self.options:
            yield from option.any()

    def has_kind(self, *kinds: str) -> bool:
        return any(one.kind in kinds for one in self.any())

    def wrapped_by(self, *wrappers: str) -> bool:
        """Whether it may be a model wrapped by one of these; `torch.compile` is looked through."""
        return any(one.wrapper in wrappers for one in self.any())

    def known(self, default: Any = None) -> Any:
        """The literal it holds; `default` where reading does not tell."""
        return default if self.const is UNKNOWN else self.const

    def likely(self, default: Any = None) -> Any:
        """The literal, or the default that somebody may override on the command line."""
        if self.const is not UNKNOWN:
            return self.const
        return default if self.default is UNKNOWN else self.default

    @property
    def divergent(self) -> bool:
        """Whether ranks may differ in it."""
        return bool(self.taints & DIVERGENT)

    def inputs(self) -> "Iterator[Value]":
        """What it was computed from."""
        yield from (*self.sources, *self.options)
        yield from (one for one in (self.element_of, self.receiver) if one is not None)
        yield from (*(self.items or ()), *(self.entries or {}).values())

    def origins(self) -> "Iterator[Value]":
        """It and all it was computed from, nearest first, each once."""
        seen: set[int] = set()
        queue = deque([self])
        while queue:
            one = queue.popleft()
            if id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            queue += one.inputs()


def cleared(value: Value) -> None:
    """Make a value the same on all ranks: a collective has just written into it."""
    for one in value.any():
        one.taints = frozenset()
        one.main = None
        one.fields.pop("*", None)  # what a comprehension filled it with
        for index, item in enumerate(one.items or ()):
            assert one.items is not None
            one.items[index] = Value(sources=(item,), kind=item.kind, label=item.label)
    value.taints = frozenset()
    value.main = None


ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "FloorDiv": operator.floordiv,
    "Div": operator.truediv,
    "Mod": operator.mod,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}


def computed(sign: str, *constants: Any) -> Any:
    """What an operation gives on constants; UNKNOWN where it fails or is none of ours."""
    try:
        return ARITHMETIC[sign](*constants)
    except (KeyError, ArithmeticError, TypeError, ValueError):
        return UNKNOWN


def stops_gradients(entered: Value) -> bool:
    """Whether what a `with` enters is `torch.no_grad()` or `torch.inference_mode()`."""
    name = entered.name or entered.instance or str(getattr(entered.call, "name", ""))
    return name.endswith((".no_grad", ".inference_mode"))


def innermost(model: Value) -> Value:
    """The plain model under all wrappers."""
    for _ in range(10):
        if model.inner is None:
            return model
        model = model.inner
    return model


def all_taints(parts: Iterable[Value]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for one in parts:
        found |= one.taints
    return found


UNSEEN = "unseen"
"""The instance of what a function of one's own gives that was called too often to be walked."""
