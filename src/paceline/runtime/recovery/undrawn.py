"""Build a model without drawing its weights, when others are put in their place at once.

Drawing 8 billion numbers takes a processor core about a minute; making room for them takes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.exponential_,
        Tensor.log_normal_,
        Tensor.cauchy_,
        Tensor.erfinv_,
        Tensor.bernoulli_,
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        nn.init.sparse_,
    }
)


class Undrawn(TorchFunctionMode):
    """Inside, parameters keep whatever lies in their memory where they would be drawn at random.
    Buffers, and everything that is computed, are as always."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        drawn = args[0] if args else given.get("tensor")
        if func in _DRAWS and isinstance(drawn, nn.Parameter):
            return drawn
        return func(*args, **given)
