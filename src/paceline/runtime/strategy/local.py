"""This rank's part of a tensor, and gradients laid out as their parameters."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part; the tensor itself where it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP; any other as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def lay_out_gradient(parameter: nn.Parameter) -> None:
    """Give the gradient its parameter's layout: it may still be a sum to come over tensor ranks.

    Collective over the tensor ranks where it is.
    """
    gradient, data = parameter.grad, parameter.data
    if not isinstance(gradient, DTensor) or not isinstance(data, DTensor):
        return
    if gradient.placements != data.placements:
        parameter.grad = gradient.redistribute(placements=data.placements)
