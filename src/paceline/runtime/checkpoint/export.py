"""Convert a checkpoint in a process of its own: request on stdin, result on stdout, both JSON.

    python -m paceline.runtime.checkpoint.export < request.json

To Hugging Face safetensors, a file of torch, a folder of torch.distributed.checkpoint, DeepSpeed's
universal form and another number of files; from all of these, from GGUF files and Megatron. Every
conversion is read back, and its digest compared with that of the source.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import CheckpointError, PacelineError, reason_of
from paceline.job.adapters import WEIGHTS
from paceline.job.pretrained import files_beside
from paceline.profile.fitting import listed
from paceline.profile.hf_names import are_built_in, from_hf_name, to_hf_name
from paceline.profile.runnable import is_built_in
from paceline.record.conversion import AdapterFacts, Conversion, Converted
from paceline.record.log_files import natural
from paceline.record.run import RunFolder
from paceline.runtime.answer import answer
from paceline.runtime.checkpoint._files import WriteError
from paceline.runtime.checkpoint.adapter_files import (
    adapter_files,
    adapters_of,
    check_pairs,
    merged,
    peft_name,
)
from paceline.runtime.checkpoint.fit import check_fit
from paceline.runtime.checkpoint.own_model import frozen_weights
from paceline.runtime.checkpoint.readers import read_safetensors, read_weights
from paceline.runtime.checkpoint.state_files import (
    Load,
    StateFiles,
    compared,
    nonfinite_in,
    write_state,
)
from paceline.runtime.checkpoint.stored_names import as_stored
from paceline.runtime.checkpoint.universal import write_universal
from paceline.runtime.state import DATA, MODEL, OPTIMIZER, split_optimizer_name
from paceline.units import counted

_INDEX = "model.safetensors.index.json"
_ONE = ("model.safetensors", WEIGHTS)
"""The one file of a model, and of adapters."""

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    AttributeError,
    EOFError,
)
"""What readers of a damaged source raise, or of one that holds something else."""


_NO_FIT = (
    "put the config.json of these weights beside them; or move it away to convert the tensors as "
    "they are"
)


@dataclass(frozen=True, slots=True)
class _State:
    """What is converted, by the names it has in the source, or by ours."""

    values: Mapping[str, Load]
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    source_names: Mapping[str, str] = field(default_factory=dict)
    """Our name of a weight -> that in the source, where they differ."""

    @property
    def step(self) -> int:
        """The most steps that its optimizer counts; 0 without one."""
        counts = [n for n in self.values if n.startswith(OPTIMIZER) and n.endswith("/step")]
        return max((int(self.values[name]()) for name in counts), default=0)


def convert(asked: Conversion) -> Converted:
    """Convert, read back, and compare.

    Raises:
        CheckpointError: `C012`, it cannot be read or written.
    """
    try:
        with ExitStack() as held:
            if asked.source_form == "gguf":
                beside = Path(asked.out).parent  # a disk with room for the model
                beside.mkdir(parents=True, exist_ok=True)
                folder = held.enter_context(TemporaryDirectory(dir=beside, prefix=".gguf-"))
                asked = _unpacked(asked, Path(folder))
            state = _READERS.get(asked.source_form, _from_others)(asked)
            if state.config is not None:
                asked = replace(asked, config=state.config)
            if asked.source_form != "paceline":
                asked = replace(asked, step=state.step)
            nonfinite: dict[str, str] = {}
            state = replace(state, values=_watched(state.values, nonfinite))
            done = _WRITERS[asked.form](asked, state)
            nonfinite = {state.source_names.get(name, name): nonfinite[name] for name in nonfinite}
            if nonfinite and not asked.allow_nonfinite:
                raise _nonfinite(asked, nonfinite)
    except (*_UNREADABLE, WriteError, ImportError) as error:
        raise _problem(asked, error) from error
    except Exception as error:
        if type(error).__module__.startswith("safetensors"):
            raise _problem(asked, error) from error
        raise
    tensors = done.tensors or len(state.values)
    notes = [*state.notes, *done.notes]
    if nonfinite:
        notes.append(f"written with values that are no numbers: {_listed(nonfinite)}")
    return replace(done, tensors=tensors, notes=tuple(notes))


def _watched(values: Mapping[str, Load], nonfinite: dict[str, str]) -> dict[str, Load]:
    """The values, of which those that are no numbers are noted as they are read."""

    def read(name: str, load: Load) -> Any:
        value = load()
        if name not in nonfinite and (found := nonfinite_in(value)):
            nonfinite[name] = found
        return value

    return {name: partial(read, name, load) for name, load in values.items()}


def _listed(nonfinite: Mapping[str, str]) -> str:
    return listed([f"{n.removeprefix(MODEL)} ({found})" for n, found in sorted(nonfinite.items())])


def _nonfinite(asked: Conversion, nonfinite: Mapping[str, str]) -> CheckpointError:
    return CheckpointError.of(
        code="C016",
        what=f"{counted(len(nonfinite), 'tensor')} with values that are no numbers: "
        f"{_listed(nonfinite)}",
        where=asked.source,
        fix="take an earlier checkpoint, or convert it as it is: paceline checkpoint convert "
        "--allow-nonfinite",
    )


def _problem(asked: Conversion, error: BaseException) -> CheckpointError:
    return CheckpointError.of(
        code="C012",
        what=f"{Path(asked.source).name} could not be converted to {asked.form}: "
        + reason_of(error),
        where=asked.source,
        fix="see whether the source is whole and the folder can be written to",
    )


def _from_ours(asked: Conversion) -> _State:
    files = StateFiles(Path(asked.source))
    dropped = (DATA, OPTIMIZER) if asked.weights_only else (DATA,)
    names = [name for name in files.names if not name.startswith(dropped)]
    return _State({name: partial(files.value, name) for name in names})


def _from_others(asked: Conversion) -> _State:
    found = read_weights(asked.source_form, Path(asked.source), asked.key)
    config = asked.config if asked.config is not None else found.config
    values: dict[str, Load] = {name: each.load for name, each in found.entries.items()}
    if asked.source_form == "adapter":
        check_pairs(values, Path(asked.source))
        if asked.merge:  # by the names of the base's modules
            prefix = peft_name("")[: -len(".weight")]
            names = {each: each.removeprefix(prefix).removesuffix(".weight") for each in values}
            values = {names[each]: load for each, load in values.items()}
        return _State({MODEL + name: load for name, load in values.items()}, found.notes, config)
    notes = [*found.notes]
    if config is not None:
        shapes = {name: each.shape for name, each in found.entries.items()}
        fit = check_fit(config, shapes, where=asked.source)
        if fit.problems:
            raise CheckpointError(*(replace(each, fix=_NO_FIT) for each in fit.problems))
        notes += [f"not checked: {fit.skipped}"] if fit.skipped else []
    unread = found.unread
    if asked.optimizer_elsewhere and not found.optimizer:
        unread = unread or "it is in a file of its own, with numbers in place of names"
    for owner, state in found.optimizer.items():
        values |= {f"{OPTIMIZER}{owner}/{key}": each.load for key, each in state.items()}
    if asked.weights_only or asked.form == "safetensors":
        values = {n: load for n, load in values.items() if not n.startswith(OPTIMIZER)}
        if unread or found.optimizer:
            notes.append("the optimizer's state is left out: these are the weights alone")
    elif unread:
        raise CheckpointError.of(
            code="C012",
            what=f"the optimizer's state of {Path(asked.source).name} cannot be carried: {unread}",
            where=asked.source,
            fix="take the weights alone: --weights-only; or save it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which has names",
        )
    return _by_our_names(asked, config, values, notes)


def _tensors_in(paths: Iterable[Path | str]) -> dict[str, Load]:
    return {
        name: each.load
        for path in paths
        for name, each in read_safetensors(Path(path)).entries.items()
    }


def _unpacked(asked: Conversion, folder: Path) -> Conversion:
    """The model of a GGUF file as a folder of transformers, which is converted in its place.

    transformers gives every weight its value in float32; it refuses to save a model that it
    remembers as quantised (transformers 5.23), so it is made to forget.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(asked.source)
    named = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**named).save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return replace(
        asked,
        source=str(folder),
        source_form="safetensors",
        config=config,
        beside=files_beside(folder),
    )


def _by_our_names(
    asked: Conversion,
    config: Mapping[str, Any] | None,
    values: dict[str, Load],
    told: Sequence[str],
) -> _State:
    known, notes = config or {}, [*told]
    if known.get("tie_word_embeddings") and "lm_head.weight" in values:
        del values["lm_head.weight"]
        notes.append("lm_head.weight is the embedding, by config.json: it is saved once")
    weights = {name for name in values if not name.startswith(OPTIMIZER)}
    source_names: dict[str, str] = {}
    may_be_ours = known and is_built_in(known) and asked.form not in ("torch", "dcp", "deepspeed")
    if may_be_ours and all(map(from_hf_name, weights)):
        values = _renamed(values, from_hf_name)
        source_names = {f"{MODEL}{from_hf_name(name)}": name for name in weights}
        notes.append("names are those of the built-in decoder, which this model can be")
    elif not known and asked.form == "paceline" and all(map(from_hf_name, weights)):
        notes.append(
            "names stay Hugging Face's, and the built-in decoder has others: if this is a Llama, "
            "put its config.json beside it and convert again"
        )
    values = {n if n.startswith(OPTIMIZER) else MODEL + n: each for n, each in values.items()}
    return _State(values, tuple(notes), config, source_names)


def _renamed(values: Mapping[str, Load], rename: Callable[[str], str | None]) -> dict[str, Load]:
    """Values under other names of their parameters; a parameter without one keeps its own."""

    def name_of(name: str) -> str:
        if not name.startswith(OPTIMIZER):
            return rename(name) or name
        owner, key, part = split_optimizer_name(name)
        return f"{OPTIMIZER}{rename(owner) or owner}/{key}{part}"

    return {name_of(name): load for name, load in values.items()}


def _to_ours(asked: Conversion, state: _State) -> Converted:
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    path = write_state(out, state.values, asked.step, ranks=asked.ranks, **asked.facts)
    written = StateFiles(path)
    after = {name: partial(written.value, name) for name in written.names}
    files = sorted(path.iterdir())
    return Converted(
        files=tuple(map(str, files)),
        num_bytes=sum(file.stat().st_size for file in files),
        **compared(state.values, after),
    )


def _to_peft(asked: Conversion, state: _State, facts: AdapterFacts) -> Converted:
    values = {name.removeprefix(MODEL): load for name, load in state.values.items()}
    values = _in_type(values, asked.dtype)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    files = [*adapter_files(values, out, facts), *_copy_beside(asked, out)]
    before = {peft_name(name): load for name, load in adapters_of(values).items()}
    return Converted(
        files=tuple(map(str, files)),
        num_bytes=sum(file.stat().st_size for file in files),
        tensors=len(before),
        **compared(before, _tensors_in(files[:1])),
        notes=(
            "adapters alone, as peft reads them: the checkpoint has no other weights",
            *(["they were trained beside weights in NF4"] if facts.quantised else []),
        ),
    )


def _to_safetensors(asked: Conversion, state: _State) -> Converted:
    from safetensors.torch import save_file

    if asked.adapters is not None and not asked.merge:
        return _to_peft(asked, state, asked.adapters)
    notes = []
    model = {name.removeprefix(MODEL): load for name, load in state.values.items()}
    model = {n: load for n, load in model.items() if not n.startswith(OPTIMIZER)}
    if len(model) < len(state.values):
        notes.append("optimizer state has no place in safetensors and is left out")
    if asked.adapters is not None:
        told, is_drawn = asked.adapters, bool(asked.adapters.run)
        base = _tensors_in(told.weights)
        if is_drawn:
            base = frozen_weights(RunFolder(Path(told.run)), Path(asked.source))
        model = merged(base, adapters_of(model), told)
        if is_drawn and asked.config is not None:
            model = as_stored(model, asked.config)
        notes = ["the adapters are merged: each sum in float32, rounded once to the weight's type"]
        if asked.adapters.quantised:
            notes.append(
                "the adapters were trained beside these weights in NF4, and are merged into them "
                "as they are in the files: expect slightly other outputs than in the run"
            )
    elif are_built_in(model):
        model = {str(to_hf_name(name)): load for name, load in model.items()}
        notes.append("names are those of Hugging Face's Llama, which the built-in decoder is")
    elif asked.config is not None:
        model = as_stored(model, asked.config)
    model = _in_type(model, asked.dtype)
    sizes = {name: load().nbytes for name, load in model.items()}
    groups = _grouped(sizes, asked.max_shard_bytes)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = (
            _ONE[asked.source_form == "adapter" and not asked.merge]
            if len(groups) == 1
            else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        save_file({each: model[each]() for each in group}, out / name, metadata={"format": "pt"})
        files.append(out / name)
        places |= dict.fromkeys(group, name)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        files.append(out / _INDEX)
        files[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if asked.config is not None:
        files.append(out / "config.json")
        files[-1].write_text(json.dumps(_config_of(asked, asked.config), indent=2) + "\n")
    elif asked.source_form != "adapter":
        notes.append("config.json is not written: the model's is not known")
    written = [path for path in files if path.suffix == ".safetensors"]
    files += _copy_beside(asked, out)
    return Converted(
        files=tuple(map(str, files)),
        num_bytes=sum(file.stat().st_size for file in files),
        tensors=len(model),
        **compared(model, _tensors_in(written)),
        notes=tuple(notes),
    )


def _copy_beside(asked: Conversion, out: Path) -> list[Path]:
    return [Path(shutil.copy(each, out)) for each in asked.beside if Path(each).is_file()]


def _in_type(values: Mapping[str, Load], dtype: str | None) -> dict[str, Load]:
    if dtype is None:
        return dict(values)

    def rounded(load: Load) -> Any:
        value = load()
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(getattr(torch, dtype)) if is_floating else value

    return {name: partial(rounded, load) for name, load in values.items()}


def _config_of(asked: Conversion, config: Mapping[str, Any]) -> dict[str, Any]:
    if asked.dtype is None:
        return dict(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: asked.dtype}


def _grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in files of at most so many bytes, in the order of the layers."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(sizes, key=natural):
        if groups[-1] and size + sizes[name] > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += sizes[name]
    return groups


def _tree(state: _State) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for name, load in state.values.items():
        if name.startswith(OPTIMIZER):
            owner, key, part = split_optimizer_name(name)
            tree["optimizer"].setdefault("state", {}).setdefault(owner, {})[key + part] = load()
        else:
            tree["model"][name.removeprefix(MODEL)] = load()
    return tree


def _to_torch(asked: Conversion, state: _State) -> Converted:
    out = Path(asked.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"step": asked.step, **_tree(state)}, out)
    found = torch.load(out, weights_only=False, mmap=True)
    after: dict[str, Load] = {MODEL + name: partial(_same, v) for name, v in found["model"].items()}
    for owner, values in found["optimizer"].get("state", {}).items():
        after |= {f"{OPTIMIZER}{owner}/{key}": partial(_same, v) for key, v in values.items()}
    return Converted(
        files=(str(out),),
        num_bytes=out.stat().st_size,
        **compared(state.values, after),
    )


def _to_dcp(asked: Conversion, state: _State) -> Converted:
    out = Path(asked.out)
    with warnings.catch_warnings():  # that there is no process group is as it should be
        warnings.simplefilter("ignore", UserWarning)
        save({"step": asked.step, **_tree(state)}, checkpoint_id=out, no_dist=True)
    written = StateFiles(out)
    after: dict[str, Load] = {}
    for name, (first, *rest) in (written.metadata.planner_data or {}).items():
        if rest:
            after["/".join((first, *(rest[1:] if first == "optimizer" else rest)))] = partial(
                written.value, name
            )
    files = sorted(out.iterdir())
    return Converted(
        files=tuple(map(str, files)),
        num_bytes=sum(file.stat().st_size for file in files),
        **compared(state.values, after),
    )


def _to_deepspeed(asked: Conversion, state: _State) -> Converted:
    values = {name.removeprefix(MODEL): load for name, load in state.values.items()}
    if are_built_in(name for name in values if not name.startswith(OPTIMIZER)):
        values = _renamed(values, to_hf_name)
    named = {n if n.startswith(OPTIMIZER) else MODEL + n: load for n, load in values.items()}
    done = write_universal(asked, named)
    if asked.config is None:
        return done
    config = Path(asked.out) / "config.json"  # DeepSpeed leaves it alone; the way back needs it
    config.write_text(json.dumps(dict(asked.config), indent=2) + "\n")
    return replace(done, files=(*done.files, str(config)))


def _same(value: Any) -> Any:
    return value


_READERS = {"paceline": _from_ours}
_WRITERS = {
    "paceline": _to_ours,
    "safetensors": _to_safetensors,
    "torch": _to_torch,
    "dcp": _to_dcp,
    "deepspeed": _to_deepspeed,
}


def _converted(asked: Conversion) -> Converted:
    try:
        return convert(asked)
    except PacelineError as error:
        return Converted(problem=error.problems[0])


if __name__ == "__main__":
    answer(Conversion, _converted)
