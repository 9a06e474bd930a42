"""`nccl_double`: a process group for `sim` tensors that keeps ProcessGroupNCCL's contract.

- A call returns at once; `wait` orders streams and does not block the host.
- Data arrive in stream order. Until then the output is NaN.
- `abort` ends what is in flight: the output is garbage, nothing raises, the streams go on.
- A work of an aborted group is complete and without error, and `get_error` still says SUCCESS.
- One rank's abort may let another rank's collective pass, with garbage (`NCCL_DOUBLE_CONTAGION`).
- A call after `abort` raises. A tensor that is not on the device is refused.
- A lost peer is silent (as over NVLink), or an asynchronous error (as over a network).
- A watchdog looks every 100 ms, and ends the process as TORCH_NCCL_ASYNC_ERROR_HANDLING says.
- A group that is bound to a device is connected when it is made, and others are split from it.

Groups are torch's own: `MIXED` has gloo for host tensors, as `cpu:gloo,cuda:nccl` has, and torch's
operators for `sim` tensors lead here (`operators.py`). The data travel through the group's store
(`wire.py`), so that no thread sits in a call that nothing frees. Sums run in the order of ranks, so
they have the same bits in every run.

Leaves out: deadlocks of p2p calls that NCCL would run one after the other, communicators per pair,
coalescing, errors in the making of a communicator, NCCL's own flight recorder (`sequence` has its
two numbers).
"""

import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.sim import device as sim
from tests.sim import operators
from tests.sim.watchdog import watch
from tests.sim.wire import Aborted, Wire
from torch._C._distributed_c10d import Backend, ErrorType, HashStore, ProcessGroupGloo

MIXED = f"cpu:gloo,{sim.NAME}:nccl_double"

_LOOK_S = 0.001

_alive: set["Group"] = set()
"""torch holds only the C++ part of a backend, which has nothing of this file."""


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


class Options(Backend.Options):
    """What a split group begins from; `split_group` copies its parent's, as NCCL's."""

    def __init__(self, timeout):
        super().__init__("nccl_double", timeout)

    def __deepcopy__(self, memo):
        return Options(self._timeout)


class Group(ProcessGroupGloo):
    """Host tensors are refused. torch 2.13 lets no Python class be a backend (`Backend` has no
    constructor in Python), so this is gloo's, of one rank, whose own calls nothing reaches."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(HashStore(), 0, 1, _alone())
        self._rank, self._size, self._options = rank, size, Options(timeout)
        self.timeout, self.error = timeout.total_seconds(), ErrorType.SUCCESS
        self.aborted = threading.Event()
        self.works, self.splits, self.is_connected = [], 0, False
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.handling = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        self._store, self.wire = store, Wire(store, rank, size, self.aborted)
        self.sequence = {"enqueued": 0, "finished": 0}
        self._comm, self._pairs, self._count = sim.Stream(), {}, {}
        _alive.add(self)
        if not self.blocking_wait:
            threading.Thread(target=watch, args=(self,), daemon=True).start()

    def name(self):
        return "nccl_double"

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def _get_sequence_number_for_group(self):
        return self.sequence["enqueued"]

    def get_error(self):
        return self.error

    def abort(self):
        self.aborted.set()

    def shutdown(self):
        self.aborted.set()
        _alive.discard(self)

    def _set_default_timeout(self, timeout):
        self.timeout = timeout.total_seconds()

    # ---- what torch asks of a backend that is bound to a device

    supports_splitting = True

    @property
    def options(self):
        self._options._timeout = timedelta(seconds=self.timeout)
        return self._options

    def eager_connect_single_device(self, device):
        """Rank 0 hands out who they are. The rest NCCL does later, where calls do not block."""
        if self._rank == 0:
            self._store.set("id", str(device))
        else:
            self._store.wait(["id"])
        self.is_connected = True

    def perform_nocolor_split(self, device):
        """What a rank calls that is not in the group which the others split off."""
        self.splits += 1

    def comm_split_count(self):
        return self.splits

    def split(self, store, ranks, options):
        self.splits += 1
        if self._rank not in ranks:
            return None
        made = Group(store, ranks.index(self._rank), len(ranks), options._timeout)
        made.is_connected = True
        return made

    # ---- collectives: what the operators of c10d are given, by its names there

    def allreduce_(self, given):
        return self._run("allreduce", given.tensors, given.tensors, given, self._sum(given))

    allreduce_coalesced_ = reduce_ = allreduce_

    def broadcast_(self, given):
        def take(mine, key):
            every = [self.wire.all(key, one, i) for i, one in enumerate(mine)]
            return [parts[given.root_rank] for parts in every]

        return self._run("broadcast", given.tensors, given.tensors, given, take)

    def allgather_(self, given):
        def gather(mine, key):
            return [part for i, one in enumerate(mine) for part in self.wire.all(key, one, i)]

        outputs = _flat(given.output_tensors)
        return self._run("allgather", given.input_tensors, outputs, given, gather)

    def allgather_into_tensor_coalesced_(self, given):
        def gather(mine, key):
            every = [self.wire.all(key, one, i) for i, one in enumerate(mine)]
            return [torch.cat([part.reshape(-1) for part in parts]) for parts in every]

        return self._run("allgather", given.inputs, given.outputs, given, gather)

    def _allgather_base_(self, given):
        given.inputs, given.outputs = [given.input_tensor], [given.output_tensor]
        return self.allgather_into_tensor_coalesced_(given)

    def reduce_scatter_(self, given):
        summed = self._sum(given)

        def scatter(mine, key):
            return summed(mine, key)[self._rank :: self._size]

        inputs = _flat(given.input_tensors)
        return self._run("reduce_scatter", inputs, given.output_tensors, given, scatter)

    def reduce_scatter_tensor_coalesced_(self, given):
        summed = self._sum(given)

        def scatter(mine, key):
            wholes = summed(mine, key)
            return [each.reshape(-1).chunk(self._size)[self._rank] for each in wholes]

        return self._run("reduce_scatter", given.inputs, given.outputs, given, scatter)

    def _reduce_scatter_base_(self, given):
        given.inputs, given.outputs = [given.input_tensor], [given.output_tensor]
        return self.reduce_scatter_tensor_coalesced_(given)

    def alltoall_base_(self, given):
        def exchange(mine, key):
            parts = []
            for data, told in self.wire.all_split(key, mine[0], given.input_split_sizes):
                sizes = told or [data.shape[0] // self._size] * self._size
                parts.append(data.split(sizes)[self._rank].reshape(-1))
            return [torch.cat(parts)]

        return self._run("alltoall", [given.input], [given.output], given, exchange)

    def scatter_(self, given):
        outputs = given.output_tensors

        def take(mine, key):
            for rank, part in enumerate(mine):  # of the root: the others have none
                self.wire.put(f"{key}/{rank}", part)
            return [self.wire.get(f"{key}/{self._rank}", outputs[0])]

        return self._run("scatter", _flat(given.input_tensors), outputs, given, take)

    def gather_(self, given):
        def take(mine, key):
            return self.wire.all(key, mine[0], 0)

        return self._run("gather", given.input_tensors, _flat(given.output_tensors), given, take)

    def barrier(self, given):
        given.tensors, given.sum = [torch.ones(1, device=sim.NAME)], dist.ReduceOp.SUM
        given.async_op = True
        work = self.allreduce_(given)
        work.is_barrier = True  # the one collective whose `wait` makes the host wait
        return work

    # ---- point to point: a stream for each peer and direction

    def send(self, given):
        key = f"p2p/{self._rank}/{given.dst}/{self._next(('to', given.dst))}"

        def put(mine, _):
            self.wire.put(key, mine[0])
            self.wire.until_taken(key)
            return []

        return self._run("send", given.tensors, [], given, put, self._pair("to", given.dst))

    def recv_(self, given):
        key = f"p2p/{given.src}/{self._rank}/{self._next(('from', given.src))}"

        def take(mine, _):
            return [self.wire.take(key, given.tensors[0])]

        return self._run("recv", [], given.tensors, given, take, self._pair("from", given.src))

    def _pair(self, *key):
        if key not in self._pairs:
            self._pairs[key] = sim.Stream()
        return self._pairs[key]

    # ---- how one runs

    def _run(self, name, inputs, outputs, given, compute, stream=None):
        for each in (*inputs, *outputs):
            self._check_device(each.device)
        if self.aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}. ")
        key, number = name, 0
        if stream is None:
            key = f"{name}/{self._next('collective')}"
            number = self.sequence["enqueued"] = self.sequence["enqueued"] + 1
        is_async = stream is not None or given.async_op
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

    def _sum(self, given):
        def summed(mine, key):
            every = [self.wire.all(key, one, i) for i, one in enumerate(mine)]
            return [_reduce(parts, given.sum) for parts in every]

        return summed

    def _next(self, what):
        self._count[what] = self._count.get(what, -1) + 1
        return self._count[what]

    def _check_device(self, device):
        if device.type != sim.NAME:
            raise RuntimeError(f"No backend type associated with device type {device.type}")


_device = []


def _alone():
    """For gloo's group of one rank; one device for all, opened in the process that uses it."""
    if not _device:
        _device.append(ProcessGroupGloo.create_default_device())
    options = ProcessGroupGloo._Options()
    options._devices, options._threads = _device, 1
    return options


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


def _make(asked, options):
    return Group(asked.store, asked.group_rank, asked.group_size, asked.timeout)


def install():
    """Make the device and its groups known to torch, in this process."""
    sim.install()
    if "nccl_double" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("nccl_double", _make, extended_api=True, devices=[sim.NAME])
    dist.Backend.backend_capability["gloo"].append(sim.NAME)  # as it has `cuda`
    operators.install()
