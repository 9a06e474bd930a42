"""`sim`: an accelerator made of CPU memory and threads, with CUDA's contract of time.

A call puts its kernel on a stream and returns; the result is in memory once the host has
synchronised (`item`, `tolist`, `cpu`, `Stream.synchronize`), and not before. Host tensors and
device tensors do not mix. Real memory, so DDP, FSDP2 and DTensor run on it; no C++ is compiled: a
storage of device type PrivateUse1 is laid over CPU memory, and one Python fallback runs every
kernel there. A kernel takes 0.2 ms (measured; 3 us on plain CPU tensors), so models are small.

Leaves out: the caching allocator, memory limits, pinned memory, graphs.
"""

import collections
import contextlib
import queue
import sys
import threading
import time
import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_BRIEF_S = 0.02
"""A wait shorter than this does not count as one: what was queued ends by itself. A guess."""

_SWITCH_S = 0.0005
"""Python's turn between the host's thread and the streams'. With a tenth of the usual a step takes
half the time (measured)."""

_AT_ONCE = 32
"""Kernels that a stream is woken for. One by one the threads' turns cost more than the kernels; of
8 to 256 a step takes the same (37 to 53 ms of a core, one by one 87)."""

_TAKES_HOST_INDEX = {"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put"}

host_waits = threading.Event()
"""Set while the host waits for the device: a test may hold a fault back until then."""

_owners: dict[int, torch.UntypedStorage] = {}
"""Address -> the CPU memory there. An entry goes with the device storage over it."""

_here = threading.local()
_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()


class Event:
    """A place in a stream. Until recorded it counts as passed."""

    def __init__(self, device=None, *, enable_timing=False, **_):
        self._flag, self._at = threading.Event(), [0.0]
        self._flag.set()

    def record(self, stream=None):
        flag, at = self._flag, self._at = threading.Event(), [0.0]

        def passed():
            at[0] = time.perf_counter()
            flag.set()

        (stream or current_stream()).put(passed)

    def wait(self, stream=None):
        (stream or current_stream()).put(self._flag.wait)

    def query(self):
        return self._flag.is_set()

    def synchronize(self):
        self._flag.wait()
        check()

    def elapsed_time(self, end):
        return 1000 * (end._at[0] - self._at[0])


class Stream:
    """First in, first out, on a thread of its own."""

    def __init__(self, device=None, priority=0, **_):
        self._jobs, self._calls = collections.deque(), queue.SimpleQueue()
        _streams.add(self)
        threading.Thread(target=_work, args=(self._jobs, self._calls), daemon=True).start()

    def put(self, job):
        check()
        self._jobs.append(job)
        self._calls.put(None)

    def compute(self, job):
        """Put what nobody sees before they wait for something put after it."""
        check()
        self._jobs.append(job)
        if len(self._jobs) > _AT_ONCE:
            self._calls.put(None)

    def synchronize(self):
        if not self._jobs:  # an idle stream wakes nobody, as CUDA's
            return check()
        done = threading.Event()
        self._jobs.append(done.set)
        self._calls.put(None)
        if not done.wait(_BRIEF_S):
            host_waits.set()
            done.wait()
            host_waits.clear()
        check()

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        return self.record_event().query()

    @property
    def device(self):
        return torch.device(NAME, 0)


_broken: list[BaseException] = []


def _work(jobs, calls):
    while True:
        calls.get()
        while jobs:
            job = jobs[0]  # until it is done: a stream without jobs is idle
            try:
                if not _broken:  # a lost context runs nothing more
                    job()
                elif isinstance(getattr(job, "__self__", None), threading.Event):
                    job.__self__.set()  # but whoever waits is let go, to find the error
            except BaseException as error:  # noqa: BLE001 - the edge of a thread
                _broken.append(error)
            finally:
                jobs.popleft()
            del job


def check():
    """Raise what a kernel raised: from then on, every call does (a sticky error)."""
    if _broken:
        raise torch.AcceleratorError(f"sim error: {_broken[0]}") from _broken[0]


_default: list[Stream] = []


def current_stream(device=None):
    if not _default:
        _default.append(Stream())
    return getattr(_here, "stream", None) or _default[0]


@contextlib.contextmanager
def stream(wanted):
    before, _here.stream = getattr(_here, "stream", None), wanted
    try:
        yield
    finally:
        _here.stream = before


def synchronize(device=None):
    for each in list(_streams):
        each.synchronize()


# ---- memory -------------------------------------------------------------------------------------


def _allocate(num_bytes):
    owner = torch.UntypedStorage(max(num_bytes, 1))
    address = owner.data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(
        address, torch.device(NAME, 0), num_bytes
    )
    _owners[address] = owner
    weakref.finalize(storage, _owners.pop, address, None)
    return storage


def _over(storage, like):
    made = torch._C._acc.create_empty_tensor((0,), like.dtype)
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        BELOW, made, storage, 0, like.size(), like.stride()
    )
    return made


def empty_like_meta(meta):
    """A device tensor of the shape and strides of a meta tensor."""
    span = (
        1 + sum((n - 1) * s for n, s in zip(meta.size(), meta.stride(), strict=True))
        if meta.numel()
        else 0
    )
    return _over(_allocate(span * meta.element_size()), meta)


def host_view(tensor):
    """The CPU tensor over a device tensor's memory: for kernels, never for the host."""
    owner = _owners.get(tensor.untyped_storage().data_ptr())
    if owner is None:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.empty(0, dtype=tensor.dtype).set_(
            owner, tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def is_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


# ---- kernels ------------------------------------------------------------------------------------


def _fallback(op, *args, **kwargs):
    check()
    with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
        special = _SPECIAL.get(op._schema.name)
        if special is not None:
            return special(op, *args, **kwargs)
        if op.is_view:
            return op.redispatch(BELOW, *args, **kwargs)
        return _launch(op, args, kwargs)


def _launch(overload, args, kwargs):
    """Put the CPU kernel on the current stream, on the memory of tensors that are there already."""
    name, schema = overload._schema.name, overload._schema
    op = overload
    if any(
        isinstance(value, int | float | complex) and str(each.type) == "Tensor"
        for each, value in zip(schema.arguments, args, strict=False)
    ):
        op = overload.overloadpacket  # a number arrives where a tensor is declared
    flat, spec = pytree.tree_flatten((args, kwargs))
    if any(each.is_out for each in schema.arguments):
        _make_room(op, schema, flat, spec, args, kwargs)
    host = []
    for value in flat:
        if is_device(value):
            host.append(host_view(value))
        elif isinstance(value, torch.Tensor):
            if value.dim() and name not in _TAKES_HOST_INDEX:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices,"
                    f" {NAME}:0 and {value.device}! (in {name})"
                )
            host.append(value.detach().clone())  # its value now, as a launch takes it
        elif isinstance(value, torch.device) and value.type == NAME:
            host.append(torch.device("cpu"))
        else:
            host.append(value)
    host_args, host_kwargs = pytree.tree_unflatten(host, spec)
    if any(each.name == "generator" for each in schema.arguments):
        host_kwargs["generator"] = _generator
    tags = overload.tags
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return _at_once(op, host_args, host_kwargs)

    written = _written(schema, args, kwargs)
    if written and all(each.alias_info is not None for each in schema.returns):
        current_stream().compute(lambda: op(*host_args, **host_kwargs))
        return None if not schema.returns else written[0] if len(written) == 1 else tuple(written)
    try:
        shapes = _shapes(op, flat, spec)
    except (NotImplementedError, RuntimeError):
        return _at_once(op, host_args, host_kwargs)  # raises what is really wrong
    if not any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(shapes)):
        return _at_once(op, host_args, host_kwargs)
    made = pytree.tree_map_only(torch.Tensor, empty_like_meta, shapes)
    targets = [host_view(each) if is_device(each) else None for each in pytree.tree_leaves(made)]

    def kernel():
        leaves = pytree.tree_leaves(op(*host_args, **host_kwargs))
        for target, value in zip(targets, leaves, strict=True):
            if target is not None:
                target.copy_(value)

    if targets and not name.startswith("aten::empty"):
        current_stream().compute(kernel)
    return made


_known: dict[object, object] = {}
"""What was asked -> the answer's shapes: most of a launch's time otherwise."""


def _shapes(op, flat, spec):
    """The result on the device `meta`."""

    def result():
        args, kwargs = pytree.tree_unflatten([_on_meta(each) for each in flat], spec)
        return op(*args, **kwargs)

    return _known_by((op, spec), flat, result)


def _known_by(what, flat, find):
    """What `find` says, found once for the same arguments."""
    key = (*what, *map(_fact, flat))
    try:
        found = _known.get(key)
    except TypeError:  # not hashable
        return find()
    if found is None:
        found = _known[key] = find()
    return found


def _fact(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.size()), value.stride())
    return (type(value), value)


def _on_meta(value):
    if isinstance(value, torch.Tensor):
        return _meta(value)
    is_here = isinstance(value, torch.device) and value.type == NAME
    return torch.device("meta") if is_here else value


def _make_room(op, schema, flat, spec, args, kwargs):
    """Give the `out=` tensors the shapes that the kernel will ask for."""
    outs = [(i, each.name) for i, each in enumerate(schema.arguments) if each.is_out]

    def sizes():
        meta = pytree.tree_unflatten([_on_meta(each) for each in flat], spec)
        op(*meta[0], **meta[1])
        return [_argument(*meta, *out).size() for out in outs]

    for out, wanted in zip(outs, _known_by(("out", op, spec), flat, sizes), strict=True):
        tensor = _argument(args, kwargs, *out)
        if tensor.size() != wanted:
            _resize(None, tensor, wanted)


def _argument(args, kwargs, index, name):
    return args[index] if index < len(args) else kwargs[name]


def _at_once(op, args, kwargs):
    """For kernels whose result the host needs, or whose shape it needs."""
    current_stream().synchronize()
    return pytree.tree_map_only(torch.Tensor, _moved, op(*args, **kwargs))


def _moved(value):
    made = empty_like_meta(_meta(value))
    host_view(made).copy_(value)
    return made


def _meta(value):
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _written(schema, args, kwargs):
    found = []
    for index, each in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(each.name)
        if each.alias_info is not None and each.alias_info.is_write and value is not None:
            found.append(value)
    return found


def _empty(op, size, *, dtype=None, memory_format=None, **_):
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return empty_like_meta(like)


def _copy_from(op, source, target, non_blocking=False):
    if is_device(source) and is_device(target):
        a, b = host_view(source), host_view(target)
        current_stream().compute(lambda: b.copy_(a))
    elif is_device(target):
        a, b = source.detach().clone(), host_view(target)  # pageable: read before the call returns
        current_stream().put(lambda: b.copy_(a))
    else:
        a, b = host_view(source), target.detach()
        current_stream().put(lambda: b.copy_(a))
        if not non_blocking:
            current_stream().synchronize()
    return target


def _to_copy(
    value,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    non_blocking=False,
    memory_format=None,
):
    """In torch's own, a copy to the host that does not block asks the device for pinned memory,
    which only C++ can give."""
    like = torch.ops.aten._to_copy(_meta(value), dtype=dtype, memory_format=memory_format)
    if device is None or device.type == NAME:
        made = empty_like_meta(like)
    else:
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    return made.copy_(value, non_blocking)


def _item(op, tensor):
    value = host_view(tensor)
    current_stream().synchronize()
    return value.item()


def _set(op, *args, **kwargs):
    return op.redispatch(BELOW, *args, **kwargs)


def _resize(op, tensor, size, **kwargs):
    """What was in the memory stays; what is new holds anything."""
    made = empty_like_meta(torch.empty(size, dtype=tensor.dtype, device="meta"))
    before, storage = tensor.untyped_storage(), made.untyped_storage()
    if before.nbytes() >= storage.nbytes():
        storage = before
    elif before.nbytes():
        old, new = _owners[before.data_ptr()], _owners[storage.data_ptr()]
        current_stream().put(lambda: new[: before.nbytes()].copy_(old[: before.nbytes()]))
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        BELOW, tensor, storage, 0, made.size(), made.stride()
    )
    return tensor


_SPECIAL = {
    "aten::empty": _empty,
    "aten::_copy_from": _copy_from,
    "aten::_local_scalar_dense": _item,
    "aten::set_": _set,
    "aten::resize_": _resize,
    "aten::_fused_sdp_choice": lambda op, *args, **kwargs: 0,  # by plain matrix products
    "aten::record_stream": lambda op, *args, **kwargs: None,
    "aten::is_pinned": lambda op, *args, **kwargs: False,
}
_generator = torch.Generator().manual_seed(0)


class _Module:
    """What `torch.cuda` is to CUDA."""

    Stream, Event = Stream, Event
    stream = staticmethod(stream)
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(lambda device=None: (current_stream(), _default[0])[1])
    synchronize = staticmethod(synchronize)
    device = staticmethod(lambda index: contextlib.nullcontext())
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 8)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    empty_cache = staticmethod(lambda: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed = manual_seed_all = staticmethod(lambda seed: _generator.manual_seed(seed))
    get_rng_state = staticmethod(lambda device=None: _generator.get_state())
    set_rng_state = staticmethod(lambda state, device=None: _generator.set_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


_library: list[torch.library.Library] = []


def install():
    """Make device type `sim` known to torch, in this process."""
    if _library:
        return
    _setup_privateuseone_for_python_backend(NAME, _Module())
    sys.setswitchinterval(_SWITCH_S)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    _library.extend((library, aten))
    plain = torch.UntypedStorage.resize_

    def resize(self, size):
        return self if self.device.type == NAME else plain(self, size)

    torch.UntypedStorage.resize_ = resize
    _let_parameters_move()


def _let_parameters_move():
    """torch lets CUDA's parameters keep their identity by `parameter.data = ...`, no other's."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    def move(parameters, buffers, device):
        for each in (*parameters, *buffers):
            if each.device != device and each.device.type != "meta":
                moved = each.detach().to(device)
                if isinstance(each, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, each.requires_grad)
                torch.utils.swap_tensors(each, moved)

    _fsdp_init._move_states_to_device = move
    torch.__future__.set_swap_module_params_on_conversion(True)
