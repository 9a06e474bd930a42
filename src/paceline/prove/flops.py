"""FLOPs of one operation, and which kind of work it is.

torch's own registry, with the two that it lacks. Elementwise work counts none, as in the planner.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from paceline.runtime._torch_private import FLASH_CPU, FLASH_CPU_BACKWARD, GROUPED_MM


def _grouped_flops(tokens: Any, weights: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """FLOPs of experts in one product: every row of the result is one inner product per column.

    With offsets over the inner dim (the gradient of the weights) the result has a matrix for each
    group, and every token is multiplied once.
    """
    if tokens.dim() == 2 and weights.dim() == 2:
        return int(2 * tokens.shape[-2] * tokens.shape[-1] * weights.shape[-1])
    return int(2 * out_val.numel() * tokens.shape[-1])


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    shapes = query.shape, _as_many_heads(key, query), _as_many_heads(value, query)
    flops = int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    is_causal = rest[1] if len(rest) > 1 else named.get("is_causal", False)
    return flops // 2 if is_causal else flops


def _attention_back_flops(
    gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any
) -> int:
    shapes = query.shape, _as_many_heads(key, query), _as_many_heads(value, query)
    flops = int(sdpa_backward_flop_count(gradient.shape, *shapes))  # type: ignore[no-untyped-call]
    is_causal = rest[3] if len(rest) > 3 else named.get("is_causal", False)
    return flops // 2 if is_causal else flops


def _as_many_heads(tensor: Any, query: Any) -> tuple[int, ...]:
    """Grouped queries share keys and values: the products are those of as many heads."""
    return (tensor.shape[0], query.shape[1], *tensor.shape[2:])


_OURS: dict[Any, Callable[..., int]] = {
    FLASH_CPU: _attention_flops,
    FLASH_CPU_BACKWARD: _attention_back_flops,
    GROUPED_MM: _grouped_flops,
}
"""The flash kernel on a CPU and experts in one kernel, which torch 2.13 does not count. Causal
attention counts half of the scores, which is what a flash kernel computes and the planner counts.
"""

ATTENTION = frozenset(
    (
        FLASH_CPU,
        FLASH_CPU_BACKWARD,
    )
)


def flops_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call of an operation; 0 for elementwise ones."""
    ours = _OURS.get(packet)
    if ours is not None:
        return ours(*args, **kwargs, out_val=out)
    theirs = flop_registry.get(packet)
    if theirs is None:
        return 0
    return int(theirs(*args, **kwargs, out_val=out))
