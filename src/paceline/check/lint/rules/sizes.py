"""Tensors whose size this rank's data decides, in collectives that need equal sizes."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import INIT_GROUP
from paceline.check.lint.program import Program
from paceline.check.lint.values import DATA, Value

EQUAL_SIZES = {
    "torch.distributed.all_gather": 1,
    "torch.distributed.all_gather_into_tensor": 1,
    "torch.distributed.all_reduce": 0,
    "torch.distributed.broadcast": 0,
    "torch.distributed.gather": 0,
    "torch.distributed.reduce": 0,
    "torch.distributed.reduce_scatter": 1,
    "torch.distributed.reduce_scatter_tensor": 1,
    "torch.distributed.nn.all_gather": 0,
    "torch.distributed.nn.all_reduce": 0,
    "accelerate.Accelerator.gather": 0,
    "accelerate.Accelerator.reduce": 0,
}
"""Collectives whose ranks have to pass tensors of one size, and the tensor's position."""


def check_sizes(program: Program, context: Context) -> Iterator[Finding]:
    """A tensor of as many elements as this rank's data has of some kind, in a collective."""
    groups = [one.argument(0, "backend") for one in program.calls(INIT_GROUP)]
    gloo = bool(groups) and all(one is not None and one.const == "gloo" for one in groups)
    reported: set[int] = set()
    for call in program.calls(*EQUAL_SIZES):
        tensor = call.argument(
            EQUAL_SIZES[call.name], "tensor", "input_tensor", "input", "input_list"
        )
        if tensor is None or id(call.node) in reported or outputs_fit(call):
            continue
        if any(one.by_rank for one in call.guards) or not varies(program, tensor):
            continue
        reported.add(id(call.node))
        last = call.name.rpartition(".")[2]
        yield program.finding(
            "gloo-size-mismatch" if gloo else "nccl-size-mismatch",
            Severity.ERROR,
            call,
            what=(
                "this tensor has as many elements as this rank's data has of some kind: the ranks' "
                f"sizes differ, and {last} needs equal ones"
            ),
            fix="pad to the largest size (all_reduce the sizes first), or use all_gather_object",
        )


def outputs_fit(call: Call) -> bool:
    """`[torch.empty(n) for n in sizes]`: room for each rank's own size."""
    parts = call.argument(0, "tensor_list") if call.name.endswith("all_gather") else None
    made = parts.node if parts is not None else None
    if not isinstance(made, ast.ListComp):
        return False
    return "range" not in ast.unparse(made.generators[0].iter)


FINDS = frozenset(
    f"torch.{name}"
    for name in ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere")
) | {"torchvision.ops.nms", "torchvision.ops.batched_nms"}
"""Functions that give as many elements as they find."""

FIND_METHODS = frozenset(name.rpartition(".")[2] for name in FINDS if name.startswith("torch."))

KEEPS = frozenset(
    {
        *("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "int", "long", "type"),
        *("contiguous", "clone", "detach", "requires_grad_", "numpy"),
        *("unsqueeze", "flatten", "view", "reshape", "t", "squeeze"),
        *("softmax", "sigmoid", "exp", "log", "abs", "round", "add", "mul", "div", "sub"),
    }
)
"""Methods whose result has as many elements."""

ALONG = frozenset({"argmax", "argmin", "sum", "mean", "amax", "amin", "any", "all", "norm"})
"""Methods that keep the rows when they are told another dimension."""

JOINS = frozenset(f"torch.{name}" for name in ("cat", "concat", "concatenate", "vstack", "hstack"))

LIKE = frozenset(f"torch.{name}_like" for name in ("empty", "zeros", "ones", "rand", "full"))

SIZED = frozenset(f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "arange", "rand"))

MASKS = frozenset({"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"})


def varies(program: Program, tensor: Value, depth: int = 12) -> bool:
    """Whether each rank's own data decides how many elements there are.

    `x[x > 0]`, `x.nonzero()`, `torch.cat` of a list of such; what pads them is not looked through.
    """
    if depth == 0:
        return False
    if tensor.options:
        return all(varies(program, one, depth - 1) for one in tensor.any())
    made = tensor.call
    if isinstance(made, Call) and made.result is tensor:
        return made_varying(program, made, depth - 1)
    if isinstance(tensor.node, ast.Subscript) and len(tensor.sources) == 2:
        base, index = tensor.sources
        whole = rest_of_rows(tensor.node.slice) and varies(program, base, depth - 1)
        return whole or is_mask(index) or varies(program, index, depth - 1)
    if tensor.operation is not None and tensor.operation[0] not in MASKS | {"And", "Or", "Not"}:
        return any(varies(program, one, depth - 1) for one in tensor.operation[1:])
    return False


def made_varying(program: Program, made: Call, depth: int) -> bool:
    first = made.argument(0, "input", "tensors", "data", "size")
    if made.name in FINDS or (made.method in FIND_METHODS and made.receiver is not None):
        return True
    if made.name == "torch.where":
        return len(made.args) == 1
    if made.name in JOINS and first is not None:
        parts = [*(first.items or ()), *first.sources]
        fills = [one for one in parts if isinstance(one.call, Call) and one.call.name in SIZED]
        if any(not varies(program, one, depth) for one in fills):
            return False  # filled up to a size
        return any(varies(program, one, depth) for one in parts)
    if made.name in LIKE and first is not None:
        return varies(program, first, depth)
    if made.name in {"torch.tensor", "torch.as_tensor", "torch.stack"} and first is not None:
        return list_varies(program, first)
    if made.name in SIZED:
        sizes = [part for one in made.args for part in (one, *(one.items or ()))]
        return any(counts_varying(program, one, depth) for one in sizes)
    if made.method in KEEPS and made.receiver is not None and made.receiver.name is None:
        return varies(program, made.receiver, depth)
    if made.method in ALONG and made.receiver is not None and made.receiver.name is None:
        dim = made.argument(0, "dim")
        rows_stay = dim is not None and isinstance(dim.const, int) and dim.const != 0
        return rows_stay and varies(program, made.receiver, depth)
    return False


def counts_varying(program: Program, size: Value, depth: int) -> bool:
    """`len(found)`, `found.shape[0]`, `found.size(0)`."""
    made = size.call
    if isinstance(made, Call) and made.name == "builtins.len":
        return varies(program, made.args[0], depth) if made.args else False
    if isinstance(made, Call) and made.method in {"size", "numel"} and made.receiver is not None:
        dim = made.argument(0, "dim")
        return (dim is None or dim.const == 0) and varies(program, made.receiver, depth)
    shape = size.receiver
    if len(size.sources) != 2 or size.sources[1].const != 0:
        return False
    if shape is None or shape.attribute != "shape" or shape.receiver is None:
        return False
    return varies(program, shape.receiver, depth)


def rest_of_rows(index: ast.expr) -> bool:
    """`[:, 4]`, `[..., None]`: all rows."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    first = parts[0]
    if isinstance(first, ast.Slice):
        return first.lower is None and first.upper is None and first.step is None
    return isinstance(first, ast.Constant) and first.value in {None, ...}


def is_mask(index: Value, depth: int = 6) -> bool:
    """`x > 0`, `keep & (y == 1)`, `~seen`, and the first part of `[keep, None]`."""
    if depth == 0:
        return False
    if index.options:
        return all(is_mask(one, depth - 1) for one in index.any())
    if index.items:
        return is_mask(index.items[0], depth - 1)
    if index.operation is not None:
        sign, *parts = index.operation
        if sign in MASKS:
            return True
        if sign in {"BitAnd", "BitOr", "Invert"}:
            return any(is_mask(one, depth - 1) for one in parts)
        return False
    made = index.call
    if not isinstance(made, Call):
        return False
    if made.method in {"bool", "to", "cpu", "cuda"} and made.receiver is not None:
        return made.method == "bool" or is_mask(made.receiver, depth - 1)
    last = made.name.rpartition(".")[2]
    return last in {
        "isfinite",
        "isnan",
        "isin",
        "logical_and",
        "logical_or",
        "gt",
        "ge",
        "lt",
        "eq",
    }


def list_varies(program: Program, held: Value) -> bool:
    """A list with a place only for what this rank's data has: `[x for x in xs if score(x) > 0]`."""
    if isinstance(held.node, ast.ListComp):
        return any(one.ifs for one in held.node.generators) and DATA in held.taints
    for call in program.calls(method="append"):
        if call.receiver is held and call.loops:
            inside = [one for one in call.guards if one.how in {"if", "exit"}]
            if any(DATA in one.test.taints for one in inside):
                return True
    return False


RULES = (check_sizes,)
