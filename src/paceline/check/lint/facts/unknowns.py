"""What holds a value that nobody is seen to give: parameters, environment variables."""

import ast

from paceline.check.lint.facts.names import MAIN_NAMES, RANK_ENVIRONMENT, RANK_NAMES, kind_by_name
from paceline.check.lint.facts.values import RANK, UNKNOWN, Value


def parameter(name: str, annotation: str | None) -> Value:
    """What a parameter holds that nobody is seen to pass, by its name and annotation."""
    value = Value(label=name)
    if name in RANK_NAMES:
        value.taints = frozenset({RANK})
    elif name in MAIN_NAMES:
        value.taints, value.main = frozenset({RANK}), True
    value.kind = kind_by_name(name)
    if annotation is not None:
        annotate(value, annotation)
    return value


def annotate(value: Value, annotation: str) -> None:
    """What an annotation says of a parameter: `loader: DataLoader`."""
    last = annotation.strip("'\"").rpartition(".")[2]
    kinds = {
        "Module": "model",
        "DataLoader": "loader",
        "Optimizer": "optimizer",
        "Accelerator": "accelerator",
        "Fabric": "fabric",
        "DistributedSampler": "sampler",
        "GradScaler": "scaler",
        "Path": "path",
        "Tensor": None,
    }
    if last in kinds:
        value.kind = kinds[last]
    if last in {"DistributedDataParallel", "DDP"}:
        value.kind, value.wrapper = "model", "ddp"
    if last == "DistributedSampler":
        value.instance = "torch.utils.data.DistributedSampler"


def environment(variable: str, node: ast.AST, default: Value | None = None) -> Value:
    made = Value(
        node=node, instance="os.environ", attribute=variable, label=f"os.environ[{variable!r}]"
    )
    if variable in RANK_ENVIRONMENT:
        made.taints = frozenset({RANK})
    if default is not None and default.const is not UNKNOWN:
        made.default = default.const
    return made
