"""torch's way from a process group to the double: what goes through C++ with NCCL.

A collective on a group calls an operator of c10d, which torch's dispatcher sends to the group's
backend for the tensors' device; for `sim` tensors here, as a backend in Python cannot be called
from C++. What a group's own C++ asks of its backends (to split, to end) is replaced with the same
in Python; gloo's part of it stays torch's.
"""

import collections
import contextlib
import threading
import types
import warnings

import torch
import torch.distributed as dist
from tests.sim import device as sim

_OPERATORS = (
    *("allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "allgather_", "gather_"),
    *("_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "scatter_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_base_"),
    *("send", "recv_", "barrier"),
)
_SUMS = (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
)
"""Methods of a group that are given a kind of reduction."""

_FUNCTIONAL_SUMS = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out"),
)

_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM

_kept = collections.deque(maxlen=2000)
"""The last works. torch holds only the C++ part of one, which can wait for nothing without the
rest. A step of a small model has 300 at most (a guess)."""

_here = threading.local()
_library: list[torch.library.Library] = []


def install():
    """From here on, groups of torch's own class have the double for `sim` tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of C++ are replaced
        c10d = torch.library.Library("c10d", "IMPL")
        for name in _OPERATORS:
            c10d.impl(name, _to_double(name), "PrivateUse1")
        functional = torch.library.Library("_c10d_functional", "IMPL")
        for name in _FUNCTIONAL_SUMS:
            functional.impl(name, _functional(name), "PrivateUse1")
    _library.extend((c10d, functional))
    group = dist.ProcessGroup
    for name in _SUMS:
        setattr(group, name, _tells_its_sum(getattr(group, name)))
    for name in ("abort", "shutdown"):
        setattr(group, name, _double_too(name, getattr(group, name)))
    group.split_group = _splits(group.split_group)
    group._set_group_name = _has_default(group._set_group_name)


def double_of(group):
    """A group's part that sends device tensors; None for a group without, or that has ended."""
    device = torch.device(sim.NAME)
    found = group._get_backend(device) if device in group._device_types else None
    return found if found is not None and found.name() == "nccl_double" else None


def _to_double(name):
    schema = getattr(torch.ops.c10d, name).default._schema
    defaults = {each.name: each.default_value for each in schema.arguments}

    def call(*args):
        given = types.SimpleNamespace(**defaults)
        vars(given).update(zip(defaults, args, strict=False))
        given.sum = getattr(_here, "sum", dist.ReduceOp.SUM)
        double = double_of(dist.ProcessGroup.unbox(given.process_group))
        if double is None:
            raise dist.DistBackendError(
                "the group was destroyed, or is gloo's, which has no double"
            )
        work = getattr(double, name)(given)
        _kept.append(work)
        return work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())

    return call


@contextlib.contextmanager
def _summing(how):
    """The operators get the kind of reduction as an object that Python cannot read. Whoever says
    nothing (DDP's C++) adds up."""
    _here.sum = how
    try:
        yield
    finally:
        del _here.sum


def _tells_its_sum(plain):
    def call(*args, **kwargs):
        asked = [getattr(each, "reduceOp", each) for each in (*args, *kwargs.values())]
        told = [each for each in asked if isinstance(each, dist.ReduceOp)]
        with _summing(told[0] if told else dist.ReduceOp.SUM):
            return plain(*args, **kwargs)

    return call


def _functional(name):
    operator = getattr(torch.ops._c10d_functional, name).default
    where = [each.name for each in operator._schema.arguments].index("reduce_op")

    def call(*args):
        with _summing(getattr(dist.ReduceOp, args[where].upper())):
            return operator.redispatch(sim.BELOW, *args)

    return call


def _double_too(name, plain):
    def call(group):
        double = double_of(group)
        if double is not None:
            getattr(double, name)()
        plain(group)

    return call


def _has_default(plain):
    """torch takes NCCL for a mixed group's default backend, and none for one in Python."""

    def call(group, name):
        if double_of(group) is not None:
            group._set_default_backend(_CUSTOM)
        plain(group, name)

    return call


def _splits(plain):
    """`ProcessGroup::splitGroup`: every backend is split, with the same options."""

    def split(group, ranks, timeout=None, opts=None, group_name=None, group_desc=None, **only):
        double, name = double_of(group), (group_name, group_desc)
        if double is None:
            return plain(group, ranks, timeout, opts, *name, **only)
        if torch.device("cpu") in group._device_types:
            made = plain(_host_part(group), ranks, timeout, opts, *name)
        elif group.rank() in ranks:
            store = dist.PrefixStore(f"{group_name}/", group.get_group_store())
            made = dist.ProcessGroup(store, ranks.index(group.rank()), len(ranks))
        else:
            made = None
        parts = None if made is None else dist.PrefixStore(f"{sim.NAME}/", made.get_group_store())
        part = double.split(parts, ranks, opts)
        if made is not None:
            made._register_backend(torch.device(sim.NAME), _CUSTOM, part)
            made._set_group_name(group_name)
            made._set_group_desc(group_desc)
        return made

    return split


def _host_part(group):
    host, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
    part = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
    part.bound_device_id = group.bound_device_id
    part._set_default_backend(gloo)
    part._register_backend(host, gloo, group._get_backend(host))
    return part
