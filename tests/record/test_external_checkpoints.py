"""What the files of other programs' checkpoints say, by the names that each program gives them.

Names: DeepSpeed 0.19 runtime/engine.py, Megatron-LM core 0.15 training/checkpointing.py,
transformers 5 trainer.py, accelerate 1.15 checkpointing.py.
"""

import argparse
import json
import pickle
import zipfile
from pathlib import Path

import pytest

from paceline.record.external_checkpoints import ForeignCheckpoint, find_foreign

WORDS = "bf16_zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt"


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found_at(path: Path) -> ForeignCheckpoint:
    found = find_foreign(path)
    assert found is not None
    return found


def deepspeed(root: Path, *, data: int, tensor: int = 1) -> Path:
    step = root / "global_step100"
    touch(*(step / f"mp_rank_{rank:02}_model_states.pt" for rank in range(tensor)))
    for other in range(tensor):
        touch(*(step / WORDS.format(rank, other) for rank in range(data)))
    (root / "latest").write_text("global_step100\n")
    return step


def test_deepspeeds_files_tell_its_stage_and_its_ranks(tmp_path):
    step = deepspeed(tmp_path / "ds", data=4, tensor=2)
    for path in (tmp_path / "ds", step):
        found = found_at(path)
        assert (found.kind, found.form, found.step) == ("deepspeed", "ZeRO-1 or 2", 100)
        assert found.degrees == {"data": 4, "tensor": 2}
        assert found.root == tmp_path / "ds"


def test_zero_3_has_a_model_file_for_each_rank(tmp_path):
    step = deepspeed(tmp_path, data=2)
    touch(*(step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)))
    assert found_at(tmp_path).form == "ZeRO-3"


def test_a_file_of_zero_that_is_not_there_is_named(tmp_path):
    step = deepspeed(tmp_path, data=4)
    (step / WORDS.format(2, 0)).unlink()
    assert found_at(tmp_path).missing == ["zero_pp_rank_2_mp_rank_00_optim_states.pt"]


def test_a_universal_checkpoint_is_told_from_the_one_it_was_made_of(tmp_path):
    touch(tmp_path / "global_step100_universal/mp_rank_00_model_states.pt")
    touch(tmp_path / "global_step100_universal/zero/embed/fp32.pt")
    assert found_at(tmp_path / "global_step100_universal").form == "universal"


def test_megatrons_folders_tell_tensor_and_pipeline_ranks(tmp_path):
    for tensor in range(2):
        for stage in range(4):
            rank = f"iter_0000200/mp_rank_{tensor:02}_{stage:03}"
            touch(tmp_path / rank / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")
    found = found_at(tmp_path)
    assert (found.kind, found.form, found.step) == ("megatron", "legacy", 200)
    assert found.degrees == {"tensor": 2, "pipeline": 4}


def torch_file(path: Path, value: object, protocol: int) -> None:
    """As torch.save writes one that has no tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(value, protocol=protocol))


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickles_numbers_are_read_and_nothing_of_it_is_run(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    settings = argparse.Namespace(
        world_size=16, tensor_model_parallel_size=4, pipeline_model_parallel_size=2
    )
    told = {
        "bomb": Bomb(),
        "args": settings,
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
    }
    torch_file(tmp_path / "iter_0000007/common.pt", told, protocol)
    found = found_at(tmp_path / "iter_0000007")
    assert (found.form, found.step) == ("torch_dist", 7)
    assert found.degrees == {"tensor": 4, "pipeline": 2}
    assert found.optimizer_form == "dp_reshardable"
    assert not (tmp_path / "executed").exists()


def test_a_damaged_pickle_says_nothing(tmp_path):
    touch(tmp_path / "iter_0000007/common.pt")
    assert found_at(tmp_path / "iter_0000007").degrees == {}


def test_weights_with_a_file_of_the_index_missing_are_not_whole(tmp_path):
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    touch(tmp_path / names[0])
    found = found_at(tmp_path)
    assert (found.kind, found.missing) == ("weights", [names[1]])


def test_trainers_and_accelerates_own_are_told_apart(tmp_path):
    trainer, accelerate = tmp_path / "checkpoint-500", tmp_path / "state"
    touch(trainer / "trainer_state.json", trainer / "optimizer.pt", trainer / "model.safetensors")
    touch(*(trainer / f"rng_state_{rank}.pth" for rank in range(8)))
    touch(accelerate / "optimizer.bin", accelerate / "model.safetensors")
    touch(*(accelerate / f"random_states_{rank}.pkl" for rank in range(2)))
    first, second = found_at(trainer), found_at(accelerate)
    assert (first.kind, first.step, first.degrees) == ("trainer", 500, {"ranks": 8})
    assert (second.kind, second.degrees) == ("accelerate", {"ranks": 2})


def test_a_trainers_checkpoint_that_deepspeed_wrote_is_deepspeeds(tmp_path):
    touch(tmp_path / "checkpoint-100/trainer_state.json")
    deepspeed(tmp_path / "checkpoint-100", data=8)
    found = found_at(tmp_path / "checkpoint-100")
    assert (found.kind, found.degrees["data"]) == ("deepspeed", 8)


def test_torchs_own_is_found_by_its_table(tmp_path):
    step = tmp_path / "step-30"
    touch(step / ".metadata", *(step / f"__{rank}_0.distcp" for rank in range(4)))
    found = found_at(step)
    assert (found.kind, found.step, found.degrees) == ("dcp", 30, {"ranks": 4})


@pytest.mark.parametrize("name", ["checkpoint-{}", "step-{}", "checkpoint_{}"])
def test_of_several_in_a_folder_the_newest_is_taken(tmp_path, name):
    for step in (900, 1000):
        touch(tmp_path / name.format(step) / "trainer_state.json")
    touch(tmp_path / name.format(2000) / "unfinished")
    assert found_at(tmp_path).step == 1000


def test_a_folder_of_other_things_is_none(tmp_path):
    touch(tmp_path / "notes.txt", tmp_path / "mp_rank_00.txt")
    assert find_foreign(tmp_path) is None
    assert find_foreign(tmp_path / "notes.txt") is None
    assert find_foreign(tmp_path / "nowhere") is None
