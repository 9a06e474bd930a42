"""Runs a person's script unchanged for a few optimizer steps, and keeps what really happened.

    python -P -m paceline.runtime.script_observed RUN STEPS train.py --lr 0.1

The process ends after the last step. A step is one of the first optimizer that is used, as in
`script_profile`. Losses are the scalars that `backward()` is given.

Limitations: processes that the script starts are not observed, nor what is no torch (a DataLoader,
an optimizer, a module of its own). Only `torch.save` and safetensors count as saves.
"""

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from paceline.errors import reason_of
from paceline.record.script_observed import (
    Act,
    Observed,
    StepSeen,
    observed_file,
    write_observed,
)
from paceline.runtime._torch_private import tree_leaves
from paceline.runtime.memory import held_bytes
from paceline.runtime.script_profile import run_as_main


def main() -> None:
    """Run the script of the command line."""
    run, steps, *words = sys.argv[1:]
    observer = Observer(observed_file(Path(run), int(os.environ.get("RANK", "0"))), int(steps))
    observer.begin()
    sys.path.insert(0, "")  # for the script's own folder
    try:
        run_as_main(words)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    observer.finish()


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an observer whose failure is noted and does not reach the script."""

    @wraps(method)
    def call(self: "Observer", *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:  # noqa: BLE001 - whatever the script's objects raise when read
            trouble = f"{method.__name__.strip('_')}: {reason_of(error)}"
            if trouble not in self.seen.troubles:
                self.seen.troubles.append(trouble)
            return None

    return call


class Observer:
    """Hooks around torch, and what they have seen."""

    def __init__(self, path: Path, steps: int) -> None:
        self.seen = Observed()
        self._path = path
        self._asked_steps = steps
        self._thread = threading.current_thread()  # workers of others call modules too
        self._optimizer: torch.optim.Optimizer | None = None
        self._before: list[str] = []
        self._model: nn.Module | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._remove_hook: Callable[[], None] = lambda: None
        self._sizes: dict[int, int] = {}
        self._depth = 0
        self._began_s = 0.0
        self._losses: list[float | None] = []
        self._unscaled: tuple[Tensor, Tensor] | None = None
        self._digests: dict[int, list[str]] = {}
        self._epochs = 0
        self._timed: set[type] = set()
        self._first_row: list[int] | None = None
        self._is_over = False

    def begin(self) -> None:
        """Put the hooks in place."""
        register_optimizer_step_pre_hook(self._keep_values)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._enters)
        register_module_forward_hook(self._leaves, always_call=True)
        self._wrap(torch.autograd, "backward", self._note_losses)
        self._wrap(torch.amp.GradScaler, "scale", after=self._note_scaled)
        self._wrap(DataLoader, "__iter__", after=self._time_batches)
        load = partial(torch.load, map_location="cpu", weights_only=False)
        self._wrap(torch, "save", after=partial(self._read_back, load))
        if find_spec("safetensors") is not None:
            import safetensors.torch

            read = partial(self._read_back, safetensors.torch.load_file)
            self._wrap(safetensors.torch, "save_file", after=read)

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> None:
        """Call `before` with a function's arguments, and `after` with its result, its seconds and
        its arguments."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(args, kwargs)
            began = time.perf_counter()
            result = original(*args, **kwargs)
            if after is not None and not self._is_over:
                after(result, time.perf_counter() - began, args, kwargs)
            return result

        setattr(owner, name, call)

    # The model

    @_harmless
    def _enters(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or threading.current_thread() is not self._thread:
            return
        if self._depth == 0 and not self._is_over:
            self._notice(module)
            self._entered_s = time.perf_counter()
        self._depth += 1

    def _notice(self, module: nn.Module) -> None:
        """Take the outermost module with the most trained parameters for the model."""
        size = self._sizes.get(id(module))
        if size is None:
            size = sum(each.numel() for each in module.parameters() if each.requires_grad)
            self._sizes[id(module)] = size
        if not torch.is_grad_enabled() or size <= self.seen.parameters:
            return
        if self.seen.first_forward_at is None:
            self.seen.first_forward_at, self._began_s = time.time(), time.perf_counter()
        self._model, self.seen.parameters = module, size
        self.seen.model = type(module).__name__
        self._remove_hook()
        hook = module.register_forward_pre_hook(self._keep_inputs, with_kwargs=True)
        self._remove_hook = hook.remove
        self._write()

    def _keep_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._inputs = args, kwargs

    @_harmless
    def _leaves(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.current_thread() is not self._thread:
            return
        self._depth = max(0, self._depth - 1)
        is_model = self.seen.parameters and self._sizes.get(id(module)) == self.seen.parameters
        if self._depth or not is_model or torch.is_grad_enabled() or self._is_over:
            return  # of a wrapped model, evaluation may call what is inside
        was = self.seen.validation or Act(name=self.seen.model)
        self.seen.validation = Act(
            name=was.name,
            count=was.count + 1,
            seconds=was.seconds + time.perf_counter() - self._entered_s,
            problem=was.problem or _not_finite(output),
        )

    # Steps

    @_harmless
    def _note_losses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["tensors"]
        for each in [given] if isinstance(given, Tensor) else given:
            if self._unscaled is not None and each is self._unscaled[0]:
                each = self._unscaled[1]
            if each.numel() == 1:
                value = each.detach()
                self._losses.append(float(value) if bool(value.isfinite()) else None)

    @_harmless
    def _note_scaled(self, result: Any, _seconds: float, args: Any, _kwargs: Any) -> None:
        if isinstance(result, Tensor):
            self._unscaled = result, args[1].detach()

    @_harmless
    def _keep_values(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._before = [_digest(each) for each in self._trained()]
            self.seen.trained = len(self._before)

    def _trained(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer or self._is_over:
            return
        seconds = time.perf_counter() - self._began_s
        self._note_step(seconds)
        self._losses = []
        if len(self.seen.steps) == self._asked_steps:
            self.finish()
        self._began_s = time.perf_counter()

    @_harmless
    def _note_step(self, seconds: float) -> None:
        trained = self._trained()
        if dist.is_available() and dist.is_initialized():
            self.seen.backend = dist.get_backend()
        norms = [_norm(each.grad) for each in trained if each.grad is not None]
        norm = torch.tensor(norms, dtype=torch.float64).norm()
        self.seen.steps.append(
            StepSeen(
                seconds=seconds,
                losses=self._losses,
                grad_norm=float(norm) if bool(norm.isfinite()) else None,
                memory_bytes=held_bytes(trained[0].device),
            )
        )
        self._write()

    # Data

    @_harmless
    def _time_batches(self, iterator: Any, *_: Any) -> None:
        self._epochs += 1
        kind = type(iterator)
        if kind not in self._timed:
            self._timed.add(kind)
            self._wrap(kind, "__next__", after=self._note_batch)

    @_harmless
    def _note_batch(self, batch: Any, seconds: float, *_: Any) -> None:
        if torch.utils.data.get_worker_info() is not None:  # a process of the loader's own
            return
        self.seen.data_s += seconds
        self.seen.num_batches += 1
        if tensors := _tensors(batch):
            digests = self._digests.setdefault(self._epochs, [])
            digests.append(_joined(map(_digest, tensors)))
        if self._first_row is None and isinstance(batch, Mapping) and "input_ids" in batch:
            self._first_row = batch["input_ids"][0].tolist()

    # Files

    @_harmless
    def _read_back(
        self, load: Callable[[Any], Any], _result: None, seconds: float, args: Any, kwargs: Any
    ) -> None:
        value, file = (*args, *kwargs.values())[:2]
        if not isinstance(file, str | os.PathLike):
            return  # into memory
        try:
            problem = _difference(value, load(file))
        except Exception as error:  # noqa: BLE001 - what reading a file of any objects raises
            problem = f"cannot be read back: {reason_of(error)}"
        self.seen.saves.append(
            Act(
                name=Path(file).name,
                count=len(_tensors(value)),
                num_bytes=Path(file).stat().st_size,
                seconds=seconds,
                problem=problem,
            )
        )
        self._write()

    # The end

    def finish(self) -> None:
        """Try what is left to try, and end this process."""
        self._is_over = True
        if self._optimizer is not None:
            self._compare_values()
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                self._decode()
                self._try_reload()
                self._try_inference()
        self._write()
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # a rank that leaves sooner would break the others' last collective
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    @_harmless
    def _compare_values(self) -> None:
        trained = self._trained()
        after = [_digest(each) for each in trained]
        same = (a == b for a, b in zip(self._before, after, strict=True))
        self.seen.unchanged = sum(same)
        if not any(_is_sharded(each) for each in trained):
            self.seen.digest = _joined(after)

    @_harmless
    def _decode(self) -> None:
        """The first sample, where all tokenizers of this process agree on it."""
        base = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", None)
        if base is None or self._first_row is None:
            return
        texts = {
            each.decode(self._first_row) for each in gc.get_objects() if isinstance(each, base)
        }
        if len(texts) == 1:
            self.seen.tokens, self.seen.text = len(self._first_row), texts.pop()

    @_harmless
    def _try_reload(self) -> None:
        if self._model is None:
            return
        parts: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}
        state: dict[str, Any] = {}
        began = time.perf_counter()
        try:
            state = {name: part.state_dict() for name, part in parts.items()}
            with tempfile.NamedTemporaryFile(dir=self._path.parent, suffix=".pt") as file:
                torch.save(state, file.name)
                loaded = torch.load(file.name, weights_only=False)
                num_bytes = Path(file.name).stat().st_size
            problem = _difference(state, loaded)
            for name, part in parts.items():
                part.load_state_dict(loaded[name])
            again = {name: part.state_dict() for name, part in parts.items()}
            problem = problem or _difference(loaded, again)
        except Exception as error:  # noqa: BLE001 - state_dict and load_state_dict are the script's
            num_bytes, problem = 0, reason_of(error)
        self.seen.reload = Act(
            count=len(_tensors(state)),
            num_bytes=num_bytes,
            seconds=time.perf_counter() - began,
            problem=problem,
        )

    @_harmless
    def _try_inference(self) -> None:
        if self._model is None or self._inputs is None:
            return
        args, kwargs = self._inputs
        began = time.perf_counter()
        try:
            self._model.eval()
            with torch.no_grad():
                first, second = (self._model(*args, **kwargs) for _ in range(2))
            problem = _not_finite(first)
            if problem is None and _difference(first, second) is not None:
                problem = "two passes over one batch differ"
        except Exception as error:  # noqa: BLE001 - the model is the script's
            first, problem = None, reason_of(error)
        self.seen.inference = Act(
            count=len(_tensors(first)), seconds=time.perf_counter() - began, problem=problem
        )

    def _write(self) -> None:
        digests = [each for epoch in self._digests.values() for each in epoch]
        self.seen.num_different = len(set(digests))
        self.seen.has_one_batch = any(
            len(epoch) > 1 and len(set(epoch)) == 1 for epoch in self._digests.values()
        )
        write_observed(self._path, self.seen)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested containers. A mapping, also one of a library's own, is read by its
    sorted names: a file of safetensors has another order than what was saved."""
    if isinstance(value, Mapping):
        value = [value[name] for name in sorted(value, key=str)]
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local") or type(tensor).__name__ == "FlatParameter"


def _digest(tensor: Tensor) -> str:
    content = _local(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().data)


def _joined(digests: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(_local(gradient).float()))


def _not_finite(output: Any) -> str | None:
    for each in _tensors(output):
        if each.is_floating_point() and not bool(each.isfinite().all()):
            return "its output has NaN or infinity"
    return None


def _difference(first: Any, second: Any) -> str | None:
    """What differs between the tensors of two values of one structure."""
    ours, theirs = _tensors(first), _tensors(second)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors became {len(theirs)}"
    wrong = sum(_digest(a) != _digest(b) for a, b in zip(ours, theirs, strict=True))
    return f"{wrong} of {len(ours)} tensors differ" if wrong else None


if __name__ == "__main__":
    main()
