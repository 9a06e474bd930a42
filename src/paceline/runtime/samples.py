"""Samples of an epoch-wise training: the files of the PyTorch trainer's contract, or its own."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from paceline.units import counted

Pair = tuple[Tensor, ...]
"""Input and target."""


class Wrong(Exception):
    """Something of the request or of the model's file that a person can fix."""


def load_samples(load: Callable[[str], Any], path: str) -> "Dataset[Pair]":
    """The samples that `load`, `read_samples` or the model's own `load_data`, returns.

    Raises:
        Wrong: They are no dataset of (input, target), or none at all.
    """
    data = load(path)
    returned = f"load_data({path!r}) returned a {type(data).__name__}"
    wanted = (
        "return a dataset with a length whose samples are (input, target), as "
        "torch.utils.data.TensorDataset(x, y)"
    )
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise Wrong(f"{returned}: {wanted}")
    if not len(data):
        raise Wrong(f"{path} has no samples")
    if not isinstance(data[0], tuple | list) or len(data[0]) != 2:
        raise Wrong(f"{returned} whose first sample is a {type(data[0]).__name__}: {wanted}")
    samples: Dataset[Pair] = data
    return samples


def read_samples(path: str) -> "Dataset[Pair]":
    """Inputs as float32 and targets, from `.npz` or `.csv`."""
    if path.endswith(".npz"):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                missing = {"x", "y"} - set(arrays.files)
                if missing:
                    raise Wrong(f"{path} has no array {' and '.join(sorted(missing))}")
                x, y = arrays["x"], arrays["y"]
        except (ValueError, OSError) as error:
            raise Wrong(f"{path} cannot be read as npz: {error}") from None
    elif path.endswith(".csv"):
        try:
            if not os.path.getsize(path):
                raise Wrong(f"{path} is empty")
            table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        except (ValueError, OSError) as error:
            why = str(error).split(";")[0]  # then NumPy names options of its own
            raise Wrong(f"{path} cannot be read as numbers with a header: {why}") from None
        if table.shape[1] < 2:
            raise Wrong(
                f"{path} has {counted(table.shape[1], 'column')}, and needs inputs and a target"
            )
        x, y = table[:, :-1], table[:, -1]
        if np.array_equal(y, np.floor(y)):
            y = y.astype(np.int64)
    else:
        raise Wrong(f"{path} is neither .npz nor .csv: define load_data(path) in the model's file")
    if len(x) != len(y):
        raise Wrong(f"{path} has {len(x)} inputs and {len(y)} targets")
    for name, values in (("inputs", x), ("targets", y)):
        if not np.isfinite(values).all():
            raise Wrong(f"{path} has {name} that are not finite")
    is_class = np.issubdtype(y.dtype, np.integer)
    targets = torch.from_numpy(y.astype(np.int64 if is_class else np.float32))
    return TensorDataset(torch.from_numpy(x.astype(np.float32)), targets)
