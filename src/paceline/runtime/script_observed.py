"""Runs a person's script unchanged for a few optimizer steps, and keeps what really happened.

    python -P -m paceline.runtime.script_observed RUN STEPS train.py --lr 0.1

The process ends after the last step. A step is one of the first optimizer that is used, as in
`script_profile`; tensors and gradients are those of all optimizers. Losses are the scalars that
`backward()` is given. Hooks are global: one on a module would be pickled and copied with it.

Limitations: processes that the script starts are not observed, nor what is no torch (a DataLoader,
an optimizer, a module of its own). Only `torch.save` and safetensors count as saves.
"""

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from paceline.errors import reason_of
from paceline.record.lines import write_json
from paceline.record.script_observed import (
    Act,
    Observed,
    StepSeen,
    observed_file,
)
from paceline.runtime._torch_private import tree_map_only
from paceline.runtime.memory import held_bytes
from paceline.runtime.script_profile import run_as_main
from paceline.runtime.script_tensors import (
    difference,
    digest_of,
    is_sharded,
    joined,
    models_of,
    names_of,
    norm_of,
    not_finite,
    parameters_of,
    size_of,
    tensors_in,
)


def main() -> None:
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


@dataclass(slots=True)
class _Held:
    """A tensor that an optimizer trains."""

    tensor: Tensor
    before: str
    has_gradient: bool = False


class Observer:
    """Hooks around torch, and what they have seen."""

    def __init__(self, path: Path, steps: int) -> None:
        self.seen = Observed()
        self._path = path
        self._asked_steps = steps
        self._thread = threading.current_thread()  # workers of others call modules too
        self._optimizers: list[torch.optim.Optimizer] = []
        self._held: dict[int, _Held] = {}
        self._called: WeakKeyDictionary[nn.Module, tuple[Any, Any] | None] = WeakKeyDictionary()
        self._validated: dict[str, None] = {}
        self._norms: dict[int, float] = {}
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
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._enters)
        register_module_forward_hook(self._leaves, with_kwargs=True, always_call=True)
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
        """Remember a module that the script calls itself, with parameters that no other has."""
        if module in self._called or not torch.is_grad_enabled():
            return
        known = {id(each) for one in self._called for each in one.parameters()}
        if {id(each) for each in module.parameters() if each.requires_grad} <= known:
            return
        if self.seen.first_forward_at is None:
            self.seen.first_forward_at, self._began_s = time.time(), time.perf_counter()
        self._called[module] = None
        self._write()

    @_harmless
    def _leaves(self, module: nn.Module, args: Any, *more: Any) -> None:
        *kwargs, output = more  # torch leaves kwargs out where forward ended in an exception
        if torch.compiler.is_compiling() or threading.current_thread() is not self._thread:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth or self._is_over:
            return
        if torch.is_grad_enabled():
            if module in self._called and kwargs:  # without the graph that the inputs come from
                self._called[module] = tree_map_only(Tensor, Tensor.detach, (args, *kwargs))
            return
        sizes = {size_of(each) for each in self._called} - {0}
        if module in self._called or size_of(module) in sizes:  # also what is in a wrapped model
            self._note_validation(module, output)

    def _note_validation(self, module: nn.Module, output: Any) -> None:
        self._validated[type(module).__name__] = None
        was = self.seen.validation or Act()
        self.seen.validation = Act(
            name=" and ".join(self._validated),
            count=was.count + 1,
            seconds=was.seconds + time.perf_counter() - self._entered_s,
            problem=was.problem or not_finite(output),
        )

    def _models(self) -> list[nn.Module]:
        return models_of(list(self._called), self._held.keys())

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
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tensors = [each for each in parameters_of(optimizer) if each.requires_grad]
        new = {
            id(each): _Held(each, digest_of(each)) for each in tensors if id(each) not in self._held
        }
        if new and optimizer not in self._optimizers:  # not one inside another
            self._optimizers.append(optimizer)
        self._held |= new

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_over:
            return
        self._note_gradients(optimizer)
        if not self._optimizers or optimizer is not self._optimizers[0]:
            return
        seconds = time.perf_counter() - self._began_s
        self._note_step(seconds)
        self._losses, self._norms = [], {}
        if len(self.seen.steps) == self._asked_steps:
            self.finish()
        self._began_s = time.perf_counter()

    @_harmless
    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for each in parameters_of(optimizer):
            if each.grad is not None and id(each) in self._held:
                self._held[id(each)].has_gradient = True
                self._norms[id(each)] = norm_of(each.grad)

    @_harmless
    def _note_step(self, seconds: float) -> None:
        if dist.is_available() and dist.is_initialized():
            self.seen.backend = dist.get_backend()
        norm = torch.tensor(list(self._norms.values()), dtype=torch.float64).norm()
        self.seen.steps.append(
            StepSeen(
                seconds=seconds,
                losses=self._losses,
                grad_norm=float(norm) if bool(norm.isfinite()) else None,
                memory_bytes=held_bytes(next(iter(self._held.values())).tensor.device),
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
        if tensors := tensors_in(batch):
            digests = self._digests.setdefault(self._epochs, [])
            digests.append(joined(map(digest_of, tensors)))
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
            problem = difference(value, load(file))
        except Exception as error:  # noqa: BLE001 - what reading a file of any objects raises
            problem = f"cannot be read back: {reason_of(error)}"
        self.seen.saves.append(
            Act(
                name=Path(file).name,
                count=len(tensors_in(value)),
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
        if self._optimizers:
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
        held = list(self._held.values())
        names = names_of(self._models())
        for number, each in enumerate(held, 1):
            names.setdefault(id(each.tensor), f"tensor {number}")
        after = [digest_of(each.tensor) for each in held]
        same = zip(held, after, strict=True)
        self.seen.unchanged = [names[id(e.tensor)] for e, now in same if e.before == now]
        self.seen.no_gradient = [names[id(e.tensor)] for e in held if not e.has_gradient]
        others = (each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer))
        waiting = ([id(p) for p in parameters_of(each) if p.requires_grad] for each in others)
        self.seen.num_idle = sum(not self._held.keys() >= set(ids) for ids in waiting)
        if not any(is_sharded(each.tensor) for each in held):
            self.seen.digest = joined(after)

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
        parts: list[Any] = [*self._models(), *self._optimizers]
        if len(parts) == len(self._optimizers):
            return
        state: list[Any] = []
        began = time.perf_counter()
        try:
            state = [part.state_dict() for part in parts]
            with tempfile.NamedTemporaryFile(dir=self._path.parent, suffix=".pt") as file:
                torch.save(state, file.name)
                loaded = torch.load(file.name, weights_only=False)
                num_bytes = Path(file.name).stat().st_size
            problem = difference(state, loaded)
            for part, its in zip(parts, loaded, strict=True):
                part.load_state_dict(its)
            again = [part.state_dict() for part in parts]
            problem = problem or difference(loaded, again)
        except Exception as error:  # noqa: BLE001 - state_dict and load_state_dict are the script's
            num_bytes, problem = 0, reason_of(error)
        self.seen.reload = Act(
            count=len(tensors_in(state)),
            num_bytes=num_bytes,
            seconds=time.perf_counter() - began,
            problem=problem,
        )

    @_harmless
    def _try_inference(self) -> None:
        given = [(model, self._called[model]) for model in self._models()]
        calls = [(model, *inputs) for model, inputs in given if inputs is not None]
        if not calls:
            return
        began = time.perf_counter()
        count, problem = 0, None
        for model, args, kwargs in calls:
            try:
                model.eval()
                with torch.no_grad():
                    first, second = (model(*args, **kwargs) for _ in range(2))
                wrong = not_finite(first)
                if wrong is None and difference(first, second) is not None:
                    wrong = "two passes over one batch differ"
                count += len(tensors_in(first))
            except Exception as error:  # noqa: BLE001 - the model is the script's
                wrong = reason_of(error)
            if wrong is not None and len(calls) > 1:
                wrong = f"{type(model).__name__}: {wrong}"
            problem = problem or wrong
        self.seen.inference = Act(count=count, seconds=time.perf_counter() - began, problem=problem)

    @_harmless
    def _note_models(self) -> None:
        models = self._models()
        self.seen.models = [type(each).__name__ for each in models]
        self.seen.num_optimizers, self.seen.trained = len(self._optimizers), len(self._held)
        held = sum(each.tensor.numel() for each in self._held.values())
        self.seen.parameters = held or sum(map(size_of, models))

    def _write(self) -> None:
        self._note_models()
        digests = [each for epoch in self._digests.values() for each in epoch]
        self.seen.num_different = len(set(digests))
        self.seen.has_one_batch = any(
            len(epoch) > 1 and len(set(epoch)) == 1 for epoch in self._digests.values()
        )
        write_json(self._path, self.seen)


if __name__ == "__main__":
    main()
