"""Write DeepSpeed's universal checkpoint, which its engine loads into any ZeRO stage on any number
of ranks.

    latest_universal                          name of the folder beside it
    global_step100_universal/
        zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
        zero/optimizer_state.pt               steps, and the groups of parameters
        mp_rank_00_model_states.pt            read by ZeRO 1 and 2: steps, shapes, buffers
        zero_pp_rank_0_mp_rank_00_model_states.pt   the same, read by ZeRO 3

Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py (`merge_tp_slices`, `merge_zero3_slices`,
`_save_optimizer_state`), and the readers: deepspeed/runtime/base_optimizer.py
(`load_hp_checkpoint_state_from_checkpoint_dir`), deepspeed/runtime/zero/stage3.py
(`load_hp_checkpoint_state_from_checkpoint_dir_stage3`), deepspeed/runtime/engine.py
(`_load_checkpoint`).

Leaves out the schedule of the learning rate and the optimizer's options, which are the job's own;
and, of DeepSpeed's checkpoints, the client_state, which its own ds_to_universal keeps.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.profile.fitting import listed
from paceline.record.conversion import Conversion, Converted
from paceline.runtime.checkpoint.state_files import Load, compared
from paceline.runtime.checkpoint.zero import MOMENTS, read_deepspeed
from paceline.runtime.state import FROZEN_STATE, MODEL, OPTIMIZER, split_optimizer_name

_VERSION = "0.19.8"
"""The DeepSpeed whose form this is."""

_SIDES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")

_State = Mapping[str, Load]


def write_universal(asked: Conversion, values: _State) -> Converted:
    """Write a state by the names that it has in values, and read it back.

    Raises:
        CheckpointError: `C012`, it has something that the form has no place for, or no Adam state.
    """
    state = _adam_of(asked, values)
    out = Path(asked.out)
    folder = out / f"global_step{asked.step}_universal"
    for name, load in state.items():
        kind, parameter, key = _place(name)
        if kind == OPTIMIZER or parameter in _trained(state):
            _save(_file(folder, parameter, key), load, is_table=key != "step")
    trained = _trained(state)
    others = {
        name.removeprefix(MODEL): load()
        for name, load in state.items()
        if name.startswith(MODEL) and name.removeprefix(MODEL) not in trained
    }
    groups: list[dict[str, Any]] = [{"params": []} for _ in trained]
    # ZeRO 1 and 2 read as many groups as are here, so that there is one for each parameter: a job
    # may group them as it likes. ZeRO 3 reads the steps of the first, for all.
    steps = state[f"{OPTIMIZER}{trained[0]}/step"]()
    common = {
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": steps}}, "param_groups": groups[:1]},
    }
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    shapes = OrderedDict((name, state[MODEL + name]().shape) for name in trained)
    _write_sides(folder, asked, shapes, others)
    options = "learning rate, betas and weight decay are those of the job that loads it"
    notes = [f"{options}: engine.load_checkpoint(OUT, load_lr_scheduler_states=False)"]
    if others:
        notes.append(
            f"without optimizer state, and so not loaded by DeepSpeed: {listed(sorted(others))}; "
            f"they are in {_SIDES[0]} under `module`"
        )
    (out / "latest_universal").write_text(folder.name)
    files = sorted(each for each in out.rglob("*") if each.is_file())
    return Converted(
        files=(str(out / "latest_universal"), str(folder)),
        num_bytes=sum(each.stat().st_size for each in files),
        tensors=len(state),
        **compared(state, _read_back(folder)),
        notes=tuple(notes),
    )


def _trained(state: _State) -> list[str]:
    """Parameters with optimizer state."""
    return sorted({_place(name)[1] for name in state if name.startswith(OPTIMIZER)})


def _place(name: str) -> tuple[str, str, str]:
    """Kind, parameter and key of a value; the key of weights is `fp32`."""
    if name.startswith(MODEL):
        return MODEL, name.removeprefix(MODEL), "fp32"
    owner, key, _ = split_optimizer_name(name)
    return OPTIMIZER, owner, key


def _file(folder: Path, parameter: str, key: str) -> Path:
    return folder / "zero" / parameter / f"{key}.pt"


def _adam_of(asked: Conversion, values: _State) -> _State:
    """The values as the form has them: float32, and the steps an int64.

    DeepSpeed's own Adams take the steps as a whole number, which a float is not.
    """
    if FROZEN_STATE in values:
        raise _refused(
            asked,
            "is of a run of adapters: it has the adapters alone, and DeepSpeed loads a whole model",
            "write the whole model: --to safetensors --merge; or keep the adapters with their "
            "optimizer state: --to dcp",
        )
    owners: dict[str, set[str]] = {}
    for name in values:
        if name.startswith(OPTIMIZER):
            owner, key, part = split_optimizer_name(name)
            owners.setdefault(owner, set()).add(key + part)
    if not owners:
        raise _refused(
            asked,
            "has no optimizer state, and DeepSpeed loads no universal checkpoint without it",
            "write the weights for from_pretrained: --to safetensors",
        )
    for owner, keys in sorted(owners.items()):
        needed = {*MOMENTS, "step"}
        more, lost = (", ".join(sorted(each)) for each in (keys - needed, needed - keys))
        if more or lost or MODEL + owner not in values:
            what = f"has {more}" if more else f"lacks {lost}" if lost else "is no weight of it"
            raise _refused(
                asked,
                f"is not of Adam: {owner} {what}, and the universal form is of "
                f"{', '.join(MOMENTS)} and step",
                "take --to dcp, which has a place for any optimizer's state",
            )
    loads = {name: partial(_float32, load) for name, load in values.items()}
    counts: dict[int, str] = {}
    for owner in owners:
        name = f"{OPTIMIZER}{owner}/step"
        counts.setdefault(int(values[name]()), owner)
        loads[name] = partial(_whole_number, values[name])
    if len(counts) > 1:
        (few, first), *_, (many, last) = sorted(counts.items())
        raise _refused(
            asked,
            f"has parameters of different steps ({first} {few}, {last} {many}), and DeepSpeed "
            "keeps one count for a group",
            "take --to dcp, which keeps each",
        )
    strange = [n for n in values if n.startswith(MODEL) and not isinstance(values[n](), Tensor)]
    if strange:
        raise _refused(
            asked,
            f"has {strange[0].removeprefix(MODEL)}, which is no tensor",
            "take --to dcp, which keeps it",
        )
    return loads


def _refused(asked: Conversion, what: str, fix: str) -> CheckpointError:
    return CheckpointError.of(
        code="C012",
        what=f"{Path(asked.source).name} {what}",
        where=asked.source,
        fix=fix,
    )


def _float32(load: Load) -> Any:
    value = load()
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _whole_number(load: Load) -> Tensor:
    return torch.tensor(int(load()), dtype=torch.int64)


def _save(file: Path, load: Load, *, is_table: bool) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    value = load()
    torch.save({"param": value.clone(), "cat_dim": 0} if is_table else value, file)


def _write_sides(
    folder: Path, asked: Conversion, shapes: Mapping[str, Any], others: Mapping[str, Tensor]
) -> None:
    """What the engine reads beside the parameters (deepspeed/runtime/engine.py,
    `_common_checkpoint_state`)."""
    side = {
        "module": dict(others),
        "buffer_names": list(others),
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": asked.step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }
    if (samples := asked.facts.get("samples")) is not None:
        side["global_samples"] = samples
    for name in _SIDES:
        torch.save(side, folder / name)


def _read_back(folder: Path) -> _State:
    found = read_deepspeed(folder)
    after: dict[str, Load] = {MODEL + name: each.load for name, each in found.entries.items()}
    for owner, state in found.optimizer.items():
        for key, each in state.items():
            load = partial(_whole_number, each.load) if key == "step" else each.load
            after[f"{OPTIMIZER}{owner}/{key}"] = load
    return after
