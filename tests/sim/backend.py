"""`nccl_double`: a process group for `sim` tensors that keeps ProcessGroupNCCL's contract.

- A call returns at once; `wait` orders streams and does not block the host.
- Data arrive in stream order. Until then the output is NaN.
- `abort` ends what is in flight: the output is garbage, nothing raises, the streams go on.
- A work of an aborted group is complete and without error, and `get_error` still says SUCCESS.
- One rank's abort may let another rank's collective pass, with garbage (`NCCL_DOUBLE_CONTAGION`).
- A call after `abort` raises. A tensor that is not on the device is refused.
- A lost peer is silent (as over NVLink), or an asynchronous error (as over a network).
- A watchdog looks every 100 ms, and ends the process as TORCH_NCCL_ASYNC_ERROR_HANDLING says.

`nccl_double_gloo` has gloo beside it for host tensors, as `cpu:gloo,cuda:nccl` has. The data travel
through the group's store (`wire.py`), so that no thread sits in a call that nothing frees. Sums run
in the order of ranks, so they have the same bits in every run.

Leaves out: deadlocks of p2p calls that NCCL would run one after the other, communicators per pair,
errors in the making of a communicator, NCCL's own flight recorder (`sequence` has its two numbers).
"""

import os
import threading
import time

import torch
import torch.distributed as dist
from tests.sim import device as sim
from tests.sim.watchdog import watch
from tests.sim.wire import Aborted, Wire
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ErrorType
from torch.utils import _pytree as pytree

_LOOK_S = 0.001

_REDUCE, _BROADCAST, _GATHER_ALL = (
    c10d.AllreduceOptions,
    c10d.BroadcastOptions,
    c10d.AllgatherOptions,
)
_SCATTER_SUM, _EXCHANGE = c10d.ReduceScatterOptions, c10d.AllToAllOptions


class Work(dist.Work):
    """A call's handle. `wait` makes the current stream wait, not the host."""

    def __init__(self, group, outputs, deadline):
        super().__init__()
        self._group, self._outputs, self.event = group, outputs, sim.Event()
        self.deadline, self.is_barrier = deadline, False

    def is_completed(self):
        return self.event.query()

    def is_success(self):
        return self.is_completed()

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if timeout else 0
        self.event.wait()
        if self._group.blocking_wait or seconds > 0:
            end = time.monotonic() + seconds if seconds > 0 else self.deadline
            while not self.event.query():
                if time.monotonic() > end:
                    self._group.abort()
                    raise dist.DistBackendError("Watchdog caught collective operation timeout")
                time.sleep(_LOOK_S)
        elif self.is_barrier:
            sim.current_stream().synchronize()
        return True

    def synchronize(self):
        self.wait()

    def get_future(self):
        # NCCL's is complete at once, and whoever waits for it orders their stream. Here the stream
        # is ordered now: nothing tells a Python future's `wait`.
        self.event.wait()
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Named(dist.ProcessGroup):
    """What torch asks of every group that is written in Python."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._text = rank, size, "", ""

    def size(self):
        return self._size

    def getBackendName(self):
        return "nccl_double"

    def _set_group_name(self, name):
        self._name = name

    def _set_group_desc(self, text):
        self._text = text

    def getGroupName(self):
        return self._name

    def getGroupDesc(self):
        return self._text

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def supports_splitting(self):
        return False


class Group(Named):
    """The double alone: host tensors are refused."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.timeout = timeout.total_seconds()
        self.aborted = threading.Event()
        self.error = ErrorType.SUCCESS
        self.works = []
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.handling = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        self.wire = Wire(store, rank, size, self.aborted)
        self.sequence = {"enqueued": 0, "finished": 0}
        self._comm, self._pairs, self._count = sim.Stream(), {}, {}
        if not self.blocking_wait:
            threading.Thread(target=watch, args=(self,), daemon=True).start()

    @property
    def _device_types(self):
        return [torch.device(sim.NAME)]

    def _get_backend(self, device):
        self._check_device(device)
        return self

    def _get_sequence_number_for_group(self):
        return self.sequence["enqueued"]

    def get_error(self):
        return self.error

    def abort(self):
        self.aborted.set()

    shutdown = abort

    def _set_default_timeout(self, timeout):
        self.timeout = timeout.total_seconds()

    # ---- collectives

    def allreduce(self, tensors, opts=_REDUCE()):  # noqa: B008
        return self._run("allreduce", tensors, tensors, opts, self._sum(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors, opts=c10d.ReduceOptions()):  # noqa: B008
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors, opts=_BROADCAST()):  # noqa: B008
        def take(mine, key):
            every = [self.wire.all(key, one, i) for i, one in enumerate(mine)]
            return [parts[opts.rootRank] for parts in every]

        return self._run("broadcast", tensors, tensors, opts, take)

    def allgather(self, outputs, inputs, opts=_GATHER_ALL()):  # noqa: B008
        def gather(mine, key):
            return [part for i, one in enumerate(mine) for part in self.wire.all(key, one, i)]

        return self._run("allgather", inputs, _flat(outputs), opts, gather)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=_GATHER_ALL()):  # noqa: B008
        def gather(mine, key):
            every = [self.wire.all(key, one, i) for i, one in enumerate(mine)]
            return [torch.cat([part.reshape(-1) for part in parts]) for parts in every]

        return self._run("allgather", inputs, outputs, opts, gather)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def all_gather_single(self, output, one, opts=_GATHER_ALL()):  # noqa: B008
        return self.allgather_into_tensor_coalesced([output], [one], opts)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs, inputs, opts=_SCATTER_SUM()):  # noqa: B008
        summed = self._sum(opts)

        def scatter(mine, key):
            return summed(mine, key)[self._rank :: self._size]

        return self._run("reduce_scatter", _flat(inputs), outputs, opts, scatter)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=_SCATTER_SUM()):  # noqa: B008
        summed = self._sum(opts)

        def scatter(mine, key):
            wholes = summed(mine, key)
            return [each.reshape(-1).chunk(self._size)[self._rank] for each in wholes]

        return self._run("reduce_scatter", inputs, outputs, opts, scatter)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter_single(self, output, whole, opts=_SCATTER_SUM()):  # noqa: B008
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(self, output, whole, out_sizes, in_sizes, opts=_EXCHANGE()):  # noqa: B008
        def exchange(mine, key):
            parts = []
            for data, told in self.wire.all_split(key, mine[0], in_sizes):
                sizes = told or [data.shape[0] // self._size] * self._size
                parts.append(data.split(sizes)[self._rank].reshape(-1))
            return [torch.cat(parts)]

        return self._run("alltoall", [whole], [output], opts, exchange)

    alltoall_base = all_to_all_single

    def scatter(self, outputs, inputs, opts=c10d.ScatterOptions()):  # noqa: B008
        def take(mine, key):
            for rank, part in enumerate(mine):  # of the root: the others have none
                self.wire.put(f"{key}/{rank}", part)
            return [self.wire.get(f"{key}/{self._rank}", outputs[0])]

        return self._run("scatter", _flat(inputs), outputs, opts, take)

    def gather(self, outputs, inputs, opts=c10d.GatherOptions()):  # noqa: B008
        def take(mine, key):
            return self.wire.all(key, mine[0], 0)

        return self._run("gather", inputs, _flat(outputs), opts, take)

    def barrier(self, opts=c10d.BarrierOptions()):  # noqa: B008
        work = self.allreduce([torch.ones(1, device=sim.NAME)])
        work.is_barrier = True  # the one collective whose `wait` makes the host wait
        return work

    # ---- point to point: a stream for each peer and direction

    def send(self, tensors, peer, tag=0):
        key = f"p2p/{self._rank}/{peer}/{self._next(('to', peer))}"

        def put(mine, _):
            self.wire.put(key, mine[0])
            self.wire.until_taken(key)
            return []

        return self._run("send", tensors, [], None, put, self._pair("to", peer))

    def recv(self, tensors, peer, tag=0):
        key = f"p2p/{peer}/{self._rank}/{self._next(('from', peer))}"

        def take(mine, _):
            return [self.wire.take(key, tensors[0])]

        return self._run("recv", [], tensors, None, take, self._pair("from", peer))

    def _pair(self, *key):
        if key not in self._pairs:
            self._pairs[key] = sim.Stream()
        return self._pairs[key]

    # ---- how one runs

    def _run(self, name, inputs, outputs, opts, compute, stream=None):
        for each in (*inputs, *outputs):
            self._check_device(each.device)
        if self.aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}. ")
        key, number = name, 0
        if stream is None:
            key = f"{name}/{self._next('collective')}"
            number = self.sequence["enqueued"] = self.sequence["enqueued"] + 1
        is_async = stream is not None or opts is None or opts.asyncOp
        if stream is None:
            stream = self._comm if is_async else sim.current_stream()
        if is_async:
            stream.wait_event(sim.current_stream().record_event())
        work = Work(self, list(outputs), time.monotonic() + self.timeout)
        sources = [sim.host_view(each.detach()) for each in inputs]
        targets = [sim.host_view(each.detach()) for each in outputs]
        stream.put(lambda: self._kernel(sources, targets, compute, key, number))
        work.event.record(stream)
        self.works.append(work)
        return work

    def _kernel(self, sources, targets, compute, key, number):
        mine = [each.clone() for each in sources]
        before = [each.clone() for each in targets]
        for each in targets:
            _poison(each)
        try:
            results = compute(mine, key)
        except Aborted:
            if _keeps_own():
                for target, old in zip(targets, before, strict=True):
                    target.copy_(old)
            return
        for target, result in zip(targets, results, strict=False):
            target.copy_(result.view(target.shape))
        self.sequence["finished"] = max(self.sequence["finished"], number)

    def _sum(self, opts):
        def summed(mine, key):
            every = [self.wire.all(key, one, i) for i, one in enumerate(mine)]
            return [_reduce(parts, opts.reduceOp) for parts in every]

        return summed

    def _next(self, what):
        self._count[what] = self._count.get(what, -1) + 1
        return self._count[what]

    def _check_device(self, device):
        if device.type != sim.NAME:
            raise RuntimeError(f"No backend type associated with device type {device.type}")


_OF_GLOO = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""What torch calls of a Python group -> the same of gloo's."""

_ROUTED = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "reduce_scatter"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "_allgather_base"),
    *("_reduce_scatter_base", "alltoall_base", "scatter", "gather", "send", "recv", *_OF_GLOO),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
)


def _by_device(name):
    def call(self, *args, **kwargs):
        tensors = (each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor))
        if next(tensors).device.type == "cpu":
            return getattr(self.host, _OF_GLOO.get(name, name))(*args, **kwargs)
        return getattr(self.device, name)(*args, **kwargs)

    return call


class MixedGroup(Named):
    """`cpu:gloo,sim:nccl_double`, which torch cannot put together from a Python group."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.device = Group(store, rank, size, timeout)
        self.host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)

    @property
    def _device_types(self):
        return [torch.device("cpu"), torch.device(sim.NAME)]

    def _get_backend(self, device):
        return self.host if device.type == "cpu" else self.device

    def abort(self):
        for each in (self.device, self.host):
            each.abort()

    shutdown = abort

    def get_error(self):
        return self.device.get_error()

    def _set_default_timeout(self, timeout):
        for each in (self.device, self.host):
            each._set_default_timeout(timeout)

    def _get_sequence_number_for_group(self):
        return self.device._get_sequence_number_for_group()

    def barrier(self, opts=c10d.BarrierOptions()):  # noqa: B008
        on_device = opts.device is not None and opts.device.type == sim.NAME
        return (self.device if on_device else self.host).barrier(opts)


for _name in _ROUTED:
    setattr(MixedGroup, _name, _by_device(_name))


def _flat(lists):
    return [each for one in lists for each in one]


def _reduce(parts, op):
    narrow = (torch.bfloat16, torch.float16)
    wide = [each.float() if each.dtype in narrow else each for each in parts]
    total = wide[0].clone()
    for each in wide[1:]:
        if op == dist.ReduceOp.MAX:
            total = torch.maximum(total, each)
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, each)
        elif op == dist.ReduceOp.PRODUCT:
            total = total * each
        else:
            total = total + each
    if op == dist.ReduceOp.AVG:
        total = total / len(parts)
    return total.to(parts[0].dtype)


def _poison(tensor):
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 0x25)


def _keeps_own():
    """What an aborted output holds: `own` is what was there before, the likeliest and the worst
    case (a sum that lacks the others); `nan` is what a careful program may find by itself; `any`
    is now the one and now the other."""
    wanted = os.environ.get("NCCL_DOUBLE_AFTER_ABORT", "own")
    return wanted == "own" or (wanted == "any" and time.monotonic_ns() // 1000 % 2 == 0)


def install():
    """Make the device and both groups known to torch, in this process."""
    sim.install()
    if "nccl_double" not in dist.Backend.backend_list:
        dist.Backend.register_backend("nccl_double", Group, devices=[sim.NAME])
        dist.Backend.register_backend("nccl_double_gloo", MixedGroup, devices=["cpu", sim.NAME])
