"""64 bits of every tensor that a rank holds: one flipped bit anywhere changes them.

Bits and not values: 0.0 and -0.0 differ, and a NaN is like any other pattern. Two ways, both a
function of the bytes and their order alone:

- In host memory: xxh3-64, as fast as memory is read. A flipped bit goes unseen once in 2^64.
- On an accelerator: sums of 64-bit words modulo 2^64, with odd weights by column and by row, in
  torch operations that nothing waits for. One flipped bit changes a sum by an odd multiple of a
  power of two below 2^64, which is never 0: it is always seen.

Leaves out: tensors that training does not carry from step to step (gradients, activations).
"""

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

_WIDTH = 4096
"""Words in a row of the sums. A guess: wide enough that a column's sum has work for every thread,
narrow enough that a bias fills one."""

_ROWS = 0x9E3779B97F4A7C15 & ~1
"""What the sum by rows is multiplied by: even, so that a bit changes the whole by an odd multiple.
The golden ratio's bits, as in Knuth's multiplicative hashing."""

_BYTES = 0x2545F4914F6CDD1D
"""Seed of the weights: any odd number. Source: xorshift64*, Vigna, arXiv:1402.6246."""


class Fingerprint:
    """64 bits of each of some tensors, and of all together. On an accelerator they are still being
    computed when this is returned; whoever reads a number waits."""

    def __init__(self, names: Sequence[str], each: Tensor) -> None:
        self.names = names

        self.each = each
        """int64, one a tensor."""

    def whole(self) -> Tensor:
        """int64 of no dims: all of them in order, on the device where most were computed."""
        return _words(self.each).reshape(())

    def by_name(self) -> dict[str, int]:
        """Each tensor's. Waits for the accelerator."""
        return dict(zip(self.names, self.each.tolist(), strict=True))


def fingerprint(tensors: Iterator[tuple[str, Tensor]]) -> Fingerprint:
    """The fingerprint of tensors as they are now; a copy is made of none that is contiguous."""
    names, host, device = [], [], []
    for name, tensor in tensors:
        names.append(name)
        is_host = tensor.device.type == "cpu"
        host.append(_xxh3(tensor) if is_host else 0)
        if not is_host:
            device.append((len(host) - 1, sums_of_words(tensor)))
    each = torch.tensor(host, dtype=torch.int64)
    if device:
        each = each.to(device[0][1].device, non_blocking=True)
        places = torch.tensor([index for index, _ in device]).to(each.device, non_blocking=True)
        each[places] = torch.stack([value for _, value in device])
    return Fingerprint(names, each)


@torch.no_grad()
def sums_of_words(tensor: Tensor) -> Tensor:
    """int64 of no dims, on the tensor's device: weighted sums of its bytes as integers.

    Every word is read twice and nothing as large as the tensor is written.
    """
    flat = _as_integers(tensor)
    num_full = flat.numel() // _WIDTH * _WIDTH
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if num_full:
        rows = flat[:num_full].view(-1, _WIDTH)
        columns = (rows.sum(0, dtype=torch.int64) * _weights(_WIDTH, flat.device)).sum()
        by_row = rows.sum(1, dtype=torch.int64)
        total = columns + _signed(_ROWS) * (by_row * _weights(len(by_row), flat.device)).sum()
    rest = flat[num_full:].long()
    # Not the weights of a row's beginning: words of the last row could change places with them.
    return total + 3 * (rest * _weights(rest.numel(), flat.device)).sum()


def _xxh3(tensor: Tensor) -> int:
    return _signed(xxhash.xxh3_64_intdigest(tensor.reshape(-1).view(torch.uint8).numpy().data))


def _words(each: Tensor) -> Tensor:
    if each.device.type == "cpu":
        return torch.tensor(_xxh3(each))
    return sums_of_words(each)


def _as_integers(tensor: Tensor) -> Tensor:
    """A tensor's bytes as the widest integers that it is a whole number of, without a copy."""
    flat = tensor.reshape(-1)
    offset = flat.storage_offset() * flat.element_size()
    for integer in (torch.int64, torch.int32, torch.int16):
        size = integer.itemsize
        if flat.nbytes % size == 0 and offset % size == 0:
            return flat.view(integer)
    return flat.view(torch.uint8)


def _weights(num: int, device: torch.device) -> Tensor:
    steps = torch.arange(num, dtype=torch.int64, device=device)
    return (steps * 2 + 1) * _signed(_BYTES)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
