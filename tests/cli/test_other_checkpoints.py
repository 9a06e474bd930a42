"""`paceline checkpoint` on what other programs write (S0-18, S3-8)."""

import io
import json
import os
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from tests.cli.test_checkpoint import call

from paceline.cli.checkpoint import command
from paceline.cli.job_input import read_job
from paceline.cli.resume_check import _verdict as verdict_of
from paceline.cli.run_job import find_source
from paceline.errors import CheckpointError, JobError, PacelineError
from paceline.launch.helper import ask

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402
from tests.cli import other_checkpoints as other  # noqa: E402

from paceline.runtime.checkpoint.state_files import StateFiles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers, which we do not write


def here(module, request, kind):
    """What a helper process answers, without the seconds that its imports take."""
    done = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(request))))
        patch.setattr("sys.stdout", io.TextIOWrapper(done, write_through=True))
        runpy.run_module(f"paceline.runtime.{module}", run_name="__main__")
        return msgspec.json.decode(done.getvalue().splitlines()[-1], type=kind)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    for asks in ("inspect_external", "convert"):
        monkeypatch.setattr(f"paceline.launch.{asks}.ask", here)


@pytest.fixture
def processes(no_processes, monkeypatch):
    """As people run it."""
    for asks in ("inspect_external", "convert"):
        monkeypatch.setattr(f"paceline.launch.{asks}.ask", ask)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Llama of transformers, and its weights."""
    folder = tmp_path_factory.mktemp("made") / "llama"
    return folder, other.state_of(other.llama(folder))


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made[0], tmp_path / "llama"))


JOB = """
data: {seq_len: 32}
cluster: {nodes: 1, per_node: 1, accelerator: A100-80GB}
train: {global_batch: 2, steps: 2}
"""


def printed(*args):
    """Exit code and what --json prints, without what transformers writes beside it."""
    done = CliRunner().invoke(command, [*map(str, args), "--json"], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value or 0, json.loads(done.stdout)


def seen(path, *args):
    return printed("inspect", path, *args)[1]


def problems(path, *args):
    """Codes and texts that verify prints."""
    code, (result,) = printed("verify", path, *args)
    assert (code == 0) == bool(result["whole"])
    return result["problems"]


def weights_in(folder):
    return {
        name: each
        for file in folder.glob("*.safetensors")
        for name, each in load_file(file).items()
    }


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert torch.equal(found[name].to(each.dtype), each), name


def converted(source, out, *args):
    done = printed("convert", source, out, *args)[1]
    assert done["before"] == done["after"] != ""
    assert not list(out.parent.glob(".*unfinished"))
    return done


def test_s0_18_a_hugging_face_folder_is_inspected_and_verified_whole(made, processes):
    path, state = made
    facts = seen(path)
    assert facts["wrote"] == "weights of Hugging Face"
    assert (facts["model"], facts["tokenizer"]) == ("LlamaForCausalLM", True)
    assert facts["num_params"] == facts["dtypes"]["float32"] == other.num_parameters(state)
    assert facts["num_bytes"] == 4 * facts["num_params"]
    assert facts["train_bytes"] == 16 * facts["num_params"]
    code, told = call("verify", path)
    assert code == 0
    assert "names and shapes are those of LlamaForCausalLM" in told
    assert "its largest token 15 is below 16" in told
    assert "every value of 21 tensors is a number" in told


def test_s0_18_a_sharded_folder_without_a_shard_is_named_and_refused_by_every_command(tmp_path):
    other.llama(tmp_path / "m", shard="2KB")
    assert not problems(tmp_path / "m")
    lost = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    lost.unlink()
    (problem,) = problems(tmp_path / "m")
    assert (problem["code"], lost.name in problem["what"]) == ("M012", True)
    with pytest.raises(CheckpointError, match=lost.name):
        call("inspect", tmp_path / "m")
    with pytest.raises(CheckpointError, match=lost.name):
        call("convert", tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_s0_18_an_index_that_puts_a_tensor_into_another_file_is_named(tmp_path):
    other.llama(tmp_path, shard="2KB")
    index = tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    files = sorted(set(told["weight_map"].values()))
    told["weight_map"]["model.norm.weight"] = next(
        file for file in files if file != told["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(told))
    (problem,) = problems(tmp_path)
    assert "model.norm.weight" in problem["what"]


@pytest.mark.parametrize("change", [-100, 8])
def test_s0_18_a_file_that_is_cut_off_or_too_long_is_damaged(folder, change):
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size + change)
    (problem,) = problems(folder)
    assert problem["code"] == "M012"
    assert "model.safetensors" in problem["what"]
    assert "again" in problem["fix"]


def test_s0_18_a_type_of_safetensors_that_is_not_read_is_named_and_not_called_damage(tmp_path):
    header = json.dumps({"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    code, (result,) = printed("verify", file)
    assert (code, result["whole"]) == (5, None)
    (problem,) = result["problems"]
    assert (problem["code"], problem["what"]) == ("C012", "layout not read: w is of type C64")


def edited(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_s0_18_values_that_are_no_numbers_are_counted_by_tensor(folder):
    def spoil(tensors):
        tensors["model.norm.weight"][:2] = float("nan")
        tensors["model.norm.weight"][3] = float("inf")

    edited(folder, spoil)
    (problem,) = problems(folder)
    assert "is a number" not in call("verify", folder)[1]
    assert problem["code"] == "C016"
    assert "model.norm.weight (2 NaN, 1 infinite of 8)" in problem["what"]


@pytest.mark.parametrize("file", ["own.pt", "checkpoint-5/optimizer.pt"])
@pytest.mark.parametrize("name", ["ema.a", "optimizer_state_dict.state.0.exp_avg", "shadow.1"])
def test_s0_18_values_beside_the_weights_that_are_no_numbers_are_damage_by_name(
    folder, tmp_path, file, name
):
    bad = torch.tensor([float("nan"), 1.0])
    best = torch.tensor(float("inf"))  # of a loss that is not there yet
    whole = {
        "model": {"a": torch.ones(2)},
        "ema": {"a": torch.ones(2)},
        "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(2)}}},
        "shadow": [torch.ones(2), torch.ones(2)],
        "callbacks": {"best": best},
    }
    path = tmp_path / file.partition("/")[0]
    if path.suffix != ".pt":
        folder.rename(path)
        (path / "trainer_state.json").write_text("{}")
        torch.save({"lr": 0.1}, path / "scheduler.pt")
    torch.save(whole, tmp_path / file)
    code, told = call("verify", path)
    assert code == 0
    assert "checked: every value of" in told
    assert ("not checked: scheduler.pt" in told) == (not path.suffix)
    *keys, last = name.split(".")
    held = whole
    for key in keys:
        held = held[int(key) if key == "0" else key]
    held[int(last) if last == "1" else last] = bad
    torch.save(whole, tmp_path / file)
    (problem,) = problems(path)
    assert problem["code"] == "C016"
    assert problem["what"].startswith("1 tensor with values that are no numbers: ")
    assert f"{name} (1 NaN, 0 infinite of 2)" in problem["what"]


def test_s0_18_adams_state_in_the_universal_form_that_is_no_number_is_damage(made, tmp_path):
    adam = other.moments(made[1])
    other.zero(tmp_path / "ds", made[1], stage=2, ranks=2, adam=adam)
    converted(tmp_path / "ds", tmp_path / "universal", "--to", "deepspeed")
    assert (
        "every value of 63 tensors of optimizer state" in call("verify", tmp_path / "universal")[1]
    )
    (file,) = tmp_path.glob("universal/*/zero/model.norm.weight/exp_avg_sq.pt")
    found = torch.load(file)
    found["param"][0] = float("nan")
    torch.save(found, file)
    (problem,) = problems(tmp_path / "universal")
    assert "exp_avg_sq of model.norm.weight (1 NaN, 0 infinite of 8)" in problem["what"]


def test_s0_18_tensors_of_other_shapes_than_config_json_has_are_listed(folder):
    def cut(tensors):
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(12, 8)

    edited(folder, cut)
    told = " ".join(each["what"] for each in problems(folder))
    assert "model.norm.weight" in told
    assert "lm_head.weight (12 x 8, not 16 x 8)" in told


@pytest.mark.parametrize("text", ['{"model_ty', "[1]"])
def test_s0_18_a_config_json_that_cannot_be_read_is_damage_and_named_by_convert(
    folder, tmp_path, text
):
    (folder / "config.json").write_text(text)
    (folder / "tokenizer.json").write_text("{}")  # what loads it reads config.json first
    assert [each["code"] for each in problems(folder)] == ["M002"]
    with pytest.raises(JobError, match=r"config\.json is not a JSON object"):
        converted(folder, tmp_path / "out", "--to", "safetensors")
    assert not (tmp_path / "out").exists()


def test_s0_18_weights_of_another_type_than_config_json_says_are_a_warning(folder):
    edited(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    code, (result,) = printed("verify", folder)
    assert (code, result["whole"], result["problems"]) == (0, True, [])
    (warning,) = result["warnings"]
    assert warning["code"] == "C019"
    assert "float32, and most of the weights are float16" in warning["what"]
    shown = call("verify", folder)[1]
    assert shown.startswith("whole")
    assert "warning C019" in shown


def test_s0_18_a_tokenizer_that_is_larger_than_the_embedding_or_broken_is_a_problem(folder):
    other.tokenizer(folder, [*other.WORDS, "extra", "more"])
    (problem,) = problems(folder)
    assert problem["code"] == "C017"
    assert "tokens up to 17, and the embedding 16 rows" in problem["what"]
    (folder / "tokenizer.json").write_text("{")
    (problem,) = problems(folder)
    assert "the tokenizer does not load" in problem["what"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"eos_token_id": [2, 20]},
            "eos_token_id of config.json is 20, the tokenizer's largest",
        ),
        ({"vocab_size": 5000}, "5000 rows and the tokenizer 16 tokens: 4984 rows to spare"),
        ({"vocab_size": 1040}, None),  # as padding to a multiple may make it
        ({"pad_token_id": -1}, None),
    ],
)
def test_s0_18_a_tokenizer_of_another_smaller_vocabulary_is_a_warning(folder, change, said):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps(config))
    rows = config["vocab_size"]

    def grow(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, rows - 16))

    edited(folder, grow)
    code, (result,) = printed("verify", folder)
    assert (code, result["problems"]) == (0, [])
    whats = [each["what"] for each in result["warnings"] if each["code"] == "C017"]
    assert whats == [] if said is None else said in whats[0]


def test_s0_18_the_model_answers_a_prompt_and_the_answer_is_compared(folder):
    code, (result,) = printed("verify", folder, "--infer", "a b", "--tokens", "2")
    (answer,) = result["answer"]
    assert (code, len(answer.split())) == (0, 2)
    assert not problems(folder, "--infer", "a b", "--tokens", "2", "--expect", answer.split()[0])
    (problem,) = problems(folder, "--infer", "a b", "--expect", "Paris")
    assert problem["code"] == "C018"
    assert "has no 'Paris' in it" in problem["what"]


def test_s0_18_an_adapter_is_inspected_compared_with_its_base_and_merged(folder, tmp_path):
    model = other.adapter(tmp_path / "lora", folder)
    facts = seen(tmp_path / "lora")
    assert (facts["wrote"], facts["base"]) == ("a peft adapter (LORA, rank 2)", str(folder))
    assert not problems(tmp_path / "lora", "--infer", "a b", "--tokens", "1")
    converted(tmp_path / "lora", tmp_path / "merged", "--to", "safetensors", "--merge")
    wanted = other.state_of(model.merge_and_unload())
    found = weights_in(tmp_path / "merged")
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6)
    assert not problems(tmp_path / "merged")


def test_s0_18_an_adapter_of_another_base_is_a_problem(folder, tmp_path):
    other.adapter(tmp_path / "lora", folder)
    tensors = load_file(tmp_path / "lora/adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[name] = torch.zeros(2, 12)
    save_file(tensors, tmp_path / "lora/adapter_model.safetensors")
    (problem,) = problems(tmp_path / "lora")
    assert "layers.0.self_attn.q_proj (8 x 12, the base has 8 x 8)" in problem["what"]
    shutil.rmtree(folder)
    assert f"{folder} is not on this machine" in call("verify", tmp_path / "lora")[1]
    config = tmp_path / "lora/adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None})
    )
    assert "adapter against base: its config names none" in call("verify", tmp_path / "lora")[1]


def test_s0_18_an_adapter_of_another_rank_than_its_config_says_is_a_problem(folder, tmp_path):
    other.adapter(tmp_path / "lora", folder)
    config = tmp_path / "lora/adapter_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps(told | {"r": 8}))
    (problem,) = problems(tmp_path / "lora")
    assert problem["code"] == "M013"
    assert "layers.0.self_attn.q_proj.lora_A.weight (2, the config has 8)" in problem["what"]
    targets = "|".join(told["target_modules"])
    config.write_text(json.dumps(told | {"r": 8, "rank_pattern": {targets: 2}}))
    assert not problems(tmp_path / "lora")


def test_s0_18_one_matrix_of_another_rank_is_one_problem(folder, tmp_path):
    other.adapter(tmp_path / "lora", folder)
    tensors = load_file(tmp_path / "lora/adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[name] = torch.zeros(5, 8)
    save_file(tensors, tmp_path / "lora/adapter_model.safetensors")
    (problem,) = problems(tmp_path / "lora")
    assert f"{name} (5, the config has 2)" in problem["what"]
    config = tmp_path / "lora/adapter_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps(told | {"target_parameters": ["experts"]}))
    (problem,) = problems(tmp_path / "lora")
    assert f"{name} (5, its lora_B has 2)" in problem["what"]


def test_s0_18_a_rank_that_is_no_number_is_a_problem(folder, tmp_path):
    other.adapter(tmp_path / "lora", folder)
    config = tmp_path / "lora/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": "four"}))
    (problem,) = problems(tmp_path / "lora")
    assert "the rank 'four', which is no whole number" in problem["what"]
    assert problem["fix"].endswith("lora_A.weight has 2")


@pytest.mark.parametrize("has_base", [True, False])
def test_s0_18_a_matrix_of_lora_without_its_other_half_is_a_problem(folder, tmp_path, has_base):
    other.adapter(tmp_path / "lora", folder)
    file = tmp_path / "lora/adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, file)
    if not has_base:
        shutil.rmtree(folder)
    (problem,) = problems(tmp_path / "lora")
    assert "without their other half: base_model.model.model.layers.0" in problem["what"]


@pytest.mark.parametrize("half", ["A", "B"])
def test_s3_8_half_an_adapter_is_merged_into_nothing(folder, tmp_path, half):
    other.adapter(tmp_path / "lora", folder)
    file = tmp_path / "lora/adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"M012.*q_proj\.lora_"):
        call("convert", tmp_path / "lora", tmp_path / "out", "--to", "safetensors", "--merge")
    assert not (tmp_path / "out").exists()


def test_s0_18_an_adapter_that_lacks_a_layer_of_its_targets_is_a_problem(folder, tmp_path):
    other.adapter(tmp_path / "lora", folder)
    file = tmp_path / "lora/adapter_model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if "layers.0.mlp" not in name}
    save_file(tensors, file)
    (problem,) = problems(tmp_path / "lora")
    assert "which stay as they are" in problem["what"]
    assert problem["what"].endswith("layers.0.mlp.down_proj")


def test_s0_18_an_adapter_of_the_embedding_is_whole(folder, tmp_path):
    other.adapter(tmp_path / "lora", folder, target_modules=["embed_tokens", "q_proj"])
    assert not problems(tmp_path / "lora")


def test_s0_18_an_adapter_without_its_config_and_dcp_without_data_name_what_is_missing(
    folder, tmp_path
):
    other.adapter(tmp_path / "lora", folder)
    (tmp_path / "lora/adapter_config.json").unlink()
    (problem,) = problems(tmp_path / "lora")
    assert "adapter_config.json is not there" in problem["what"]
    other.as_dcp(tmp_path / "dcp", {"model": {"a": torch.ones(2)}})
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.unlink()
    (problem,) = problems(tmp_path / "dcp")
    assert (problem["code"], "*.distcp is not there" in problem["what"]) == ("M012", True)


def test_s0_18_dcp_without_its_table_is_damaged_and_an_older_whole_one_is_taken(tmp_path):
    for step in (1, 2):
        other.as_dcp(tmp_path / f"step-{step}", {"model": {"a": torch.ones(2)}})
    (tmp_path / "step-2/.metadata").unlink()
    (problem,) = problems(tmp_path / "step-2")
    assert (problem["code"], ".metadata is not there" in problem["what"]) == ("M012", True)
    assert seen(tmp_path)["step"] == 1


class Bomb:
    def __reduce__(self):
        return (os.system, (f"touch {os.environ['BOMB']}",))


@pytest.mark.parametrize("is_zip", [True, False])
def test_s0_18_a_pickle_that_would_run_code_is_refused_by_its_name(tmp_path, monkeypatch, is_zip):
    monkeypatch.setenv("BOMB", str(tmp_path / "went-off"))
    state = {"a": torch.ones(2), "b": Bomb()}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    (problem,) = problems(tmp_path / "x.pt")
    assert (problem["code"], "posix.system" in problem["what"]) == ("C015", True)
    out = tmp_path / "out"
    for verb, args in (("inspect", []), ("convert", [out, "--to", "safetensors"])):
        with pytest.raises(CheckpointError, match=r"C015.*posix\.system"):
            call(verb, tmp_path / "x.pt", *args)
    assert not (tmp_path / "went-off").exists()
    assert not (tmp_path / "out").exists()


def test_s0_18_a_table_of_dcp_that_would_run_code_is_refused_by_its_name(tmp_path, monkeypatch):
    import pickle

    monkeypatch.setenv("BOMB", str(tmp_path / "went-off"))
    other.as_dcp(tmp_path / "x", {"model": {"a": torch.ones(2)}})
    (tmp_path / "x/.metadata").write_bytes(pickle.dumps(Bomb()))
    (problem,) = problems(tmp_path / "x")
    assert (problem["code"], "posix.system" in problem["what"]) == ("C015", True)
    assert not (tmp_path / "went-off").exists()


def test_a_tensor_of_dcp_that_the_table_calls_no_tensor_runs_no_code(tmp_path, monkeypatch):
    import pickle
    from dataclasses import replace

    monkeypatch.setenv("BOMB", str(tmp_path / "went-off"))
    other.as_dcp(tmp_path / "x", {"model": {"a": torch.ones(2)}})
    table = pickle.loads((tmp_path / "x/.metadata").read_bytes())
    ((index, place),) = ((i, p) for i, p in table.storage_data.items() if i.fqn == "model.a")
    content = io.BytesIO()
    torch.save(Bomb(), content)
    with (tmp_path / "x" / place.relative_path).open("ab") as file:
        place = replace(place, offset=file.tell(), length=len(content.getvalue()))
        file.write(content.getvalue())
    del table.storage_data[index]
    table.storage_data[replace(index, offset=None, index=None)] = place
    (tmp_path / "x/.metadata").write_bytes(pickle.dumps(table))
    assert problems(tmp_path / "x")
    assert not (tmp_path / "went-off").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.pt", b"hello, I am text", "torch.save did not write it"),
        ("x.bin", b"", "torch.save did not write it"),
        ("x.safetensors", b"nothing like it", "not a whole safetensors file"),
    ],
)
def test_s0_18_a_file_of_something_else_is_named_with_the_fix(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    (problem,) = problems(tmp_path / name)
    assert (problem["code"], says in problem["what"]) == ("M012", True)
    assert "again" in problem["fix"]


def test_s0_18_a_torch_file_that_is_cut_off_is_damaged(made, tmp_path):
    torch.save(made[1], tmp_path / "x.pth")
    os.truncate(tmp_path / "x.pth", 3000)
    (problem,) = problems(tmp_path / "x.pth")
    assert problem["code"] == "M012"


def test_s0_18_an_empty_folder_and_one_that_may_not_be_read_say_so(tmp_path, monkeypatch):
    with pytest.raises(JobError, match="C011: there is no checkpoint at"):
        call("verify", tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(JobError, match=r"C011: .* cannot be read: Permission denied"):
        call("inspect", tmp_path)


def test_s0_18_the_weights_in_a_trainers_file_are_found_and_several_tables_are_asked_for(tmp_path):
    weights, moments = {"module.a": torch.ones(2)}, {"state": {0: {"exp_avg": torch.ones(2)}}}
    torch.save({"model": weights, "optimizer": moments, "epoch": 3}, tmp_path / "x.pt")
    facts = seen(tmp_path / "x.pt")
    assert [each["name"] for each in facts["tensors"]] == ["a"]
    assert "left out: optimizer" in " ".join(facts["notes"])
    torch.save({"net": weights, "ema": {"a": torch.zeros(3)}}, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match=r"2 tables of tensors: net, ema"):
        call("inspect", tmp_path / "y.pt")
    assert seen(tmp_path / "y.pt", "--key", "ema")["num_params"] == 3
    with pytest.raises(CheckpointError, match="no tensors under emo"):
        call("inspect", tmp_path / "y.pt", "--key", "emo")


def test_s3_8_weights_go_round_through_every_form_and_come_back(made, tmp_path):
    path, state = made
    first = converted(path, tmp_path / "a.pt", "--to", "torch")
    shutil.copy(path / "config.json", tmp_path)
    converted(tmp_path / "a.pt", tmp_path / "b", "--to", "dcp")
    shutil.copy(path / "config.json", tmp_path / "b")
    assert seen(tmp_path / "b")["kind"] == "dcp"
    converted(tmp_path / "b", tmp_path / "c")
    (ours,) = (tmp_path / "c").glob("step-*")
    assert call("verify", ours)[0] == 0
    converted(ours, tmp_path / "d", "--to", "dcp")
    converted(ours, tmp_path / "e", "--to", "safetensors")
    last = converted(tmp_path / "b", tmp_path / "f", "--to", "safetensors")
    assert (first["after"] != last["after"], first["weights"]) == (True, last["weights"])
    assert_same(weights_in(tmp_path / "f"), state)
    assert not problems(tmp_path / "f")
    assert_same(torch.load(tmp_path / "a.pt")["model"], state)


def values_of(folder):
    files = StateFiles(folder)
    return {name: files.value(name) for name in files.names}


def with_adam(state, adam):
    """Names and values of a checkpoint of ours."""
    made = {f"model/{name}": each.float() for name, each in state.items()}
    for owner, held in adam.items():
        made |= {f"optimizer/{owner}/{key}": value for key, value in held.items()}
    return made


@pytest.mark.parametrize(
    ("stage", "ranks", "elastic"), [(1, 2, False), (2, 3, False), (2, 2, True), (3, 3, False)]
)
def test_s3_8_zero_goes_on_with_its_optimizer_here_and_in_the_universal_form(
    made, tmp_path, stage, ranks, elastic
):
    state = made[1]
    adam = other.moments(state)
    step = other.zero(tmp_path / "ds", state, stage=stage, ranks=ranks, adam=adam, elastic=elastic)
    assert "exp_avg, exp_avg_sq, step of 21 parameters" in seen(step)["optimizer"]
    converted(tmp_path / "ds", tmp_path / "ours")
    assert_same(values_of(tmp_path / "ours/step-00000007"), with_adam(state, adam))
    converted(tmp_path / "ds", tmp_path / "universal", "--to", "deepspeed")
    assert seen(tmp_path / "universal")["form"] == "deepspeed"
    converted(tmp_path / "universal", tmp_path / "again")
    assert_same(values_of(tmp_path / "again/step-00000007"), with_adam(state, adam))
    converted(tmp_path / "ours", tmp_path / "b", "--to", "deepspeed")
    moment = tmp_path / "b/global_step7_universal/zero/lm_head.weight/exp_avg.pt"
    assert torch.equal(torch.load(moment)["param"], adam["lm_head.weight"]["exp_avg"])


def test_s3_8_optimizer_state_goes_round_through_torch_and_dcp(made, tmp_path):
    path, state = made
    adam = other.moments(state)
    other.as_dcp(tmp_path / "a", {"model": state, "optimizer": {"state": adam}})
    shutil.copy(path / "config.json", tmp_path / "a")  # a Llama, which has other names here
    done = converted(tmp_path / "a", tmp_path / "ours")
    (ours,) = (tmp_path / "ours").glob("step-*")
    assert ours.name == "step-00000007"
    assert "optimizer/blocks.0.ffn.up.weight/exp_avg" in values_of(ours)
    zero = converted(tmp_path / "a", tmp_path / "zero", "--to", "deepspeed")
    assert str(tmp_path / "zero/config.json") in zero["files"]
    back = converted(tmp_path / "zero", tmp_path / "back")
    assert values_of(tmp_path / "back/step-00000007").keys() == values_of(ours).keys()
    (tmp_path / "zero/config.json").unlink()
    back = converted(tmp_path / "zero", tmp_path / "other-names")
    assert any("put its config.json beside it" in note for note in back["notes"])
    assert (tmp_path / "zero/global_step7_universal/zero/model.norm.weight/step.pt").is_file()
    converted(tmp_path / "a", tmp_path / "b.pt", "--to", "torch")
    converted(tmp_path / "b.pt", tmp_path / "c", "--to", "dcp")
    shutil.copy(path / "config.json", tmp_path / "c")
    assert converted(tmp_path / "c", tmp_path / "d")["after"] == done["after"]
    converted(tmp_path / "c", tmp_path / "e", "--weights-only")
    assert {name.partition("/")[0] for name in values_of(tmp_path / "e/step-00000000")} == {"model"}


def test_s3_8_accelerates_optimizer_beside_its_weights_is_read(made, tmp_path):
    adam = other.moments(made[1])
    other.as_dcp(tmp_path / "x/pytorch_model_fsdp_0", {"model": made[1]})
    other.as_dcp(tmp_path / "x/optimizer_0", {"optimizer": {"state": adam}})
    (tmp_path / "x/random_states_0.pkl").write_bytes(b"")
    converted(tmp_path / "x", tmp_path / "ours")
    assert_same(values_of(tmp_path / "ours/step-00000007"), with_adam(made[1], adam))


NUMBERED = {"state": {0: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": 1}}}
WEIGHT = {"a": torch.ones(2)}


def adam_of(**changes):
    state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.ones(())}
    return {name: each for name, each in {**state, **changes}.items() if each is not None}


@pytest.mark.parametrize(
    ("tree", "form", "says"),
    [
        ({"model": WEIGHT, "optimizer": NUMBERED}, "paceline", "optimizer.state.0.exp_avg"),
        ({"model": WEIGHT}, "deepspeed", "has no optimizer state"),
        (
            {"model": WEIGHT, "optimizer": {"state": {"a": {"momentum_buffer": torch.ones(2)}}}},
            "deepspeed",
            "a has momentum_buffer",
        ),
        (
            {"model": WEIGHT, "optimizer": {"state": {"a": adam_of(exp_avg_sq=None)}}},
            "deepspeed",
            "a lacks exp_avg_sq",
        ),
        (
            {"model": WEIGHT, "optimizer": {"state": {"a": adam_of(exp_avg=torch.ones(3))}}},
            "dcp",
            "optimizer.state.a.exp_avg",
        ),
        (
            {
                "model": {**WEIGHT, "b": torch.ones(2)},
                "optimizer": {"state": {"a": adam_of(), "b": adam_of(step=torch.tensor(2.0))}},
            },
            "deepspeed",
            "different steps",
        ),
    ],
    ids=["numbered", "none", "sgd", "half", "shape", "steps"],
)
def test_s3_8_optimizer_state_that_cannot_be_carried_is_refused_by_name(tmp_path, tree, form, says):
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=says):
        call("convert", tmp_path / "x.pt", tmp_path / "out", "--to", form)
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]
    if form != "deepspeed":
        converted(tmp_path / "x.pt", tmp_path / "out", "--to", form, "--weights-only")


def test_s3_8_what_has_no_optimizer_state_is_named_and_kept_beside_the_universal_form(tmp_path):
    tree = {"model": {**WEIGHT, "mean": torch.arange(3)}, "optimizer": {"state": {"a": adam_of()}}}
    torch.save(tree, tmp_path / "x.pt")
    done = converted(tmp_path / "x.pt", tmp_path / "out", "--to", "deepspeed")
    assert "not loaded by DeepSpeed: mean" in " ".join(done["notes"])
    converted(tmp_path / "out", tmp_path / "ours")
    found = values_of(tmp_path / "ours/step-00000001")
    assert torch.equal(found["model/mean"], torch.arange(3))


def test_s3_8_values_that_are_no_numbers_are_refused_unless_they_are_asked_for(tmp_path):
    wrong = {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([float("inf")])}
    torch.save(wrong, tmp_path / "x.pt")
    for form in ("safetensors", "torch", "dcp", "paceline"):
        with pytest.raises(
            CheckpointError, match=r"C016: 2 tensors .*a \(1 NaN, 0 infinite of 2\)"
        ):
            call("convert", tmp_path / "x.pt", tmp_path / "out", "--to", form)
        assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]
    done = converted(tmp_path / "x.pt", tmp_path / "out", "--to", "torch", "--allow-nonfinite")
    assert "b (0 NaN, 1 infinite of 1)" in " ".join(done["notes"])


def test_s3_8_values_that_are_no_numbers_are_named_as_the_source_names_them(folder, tmp_path):
    name = "model.norm.weight"
    edited(folder, lambda tensors: tensors[name].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"C016: 1 tensor .*: {re.escape(name)} \(8 NaN"):
        call("convert", folder, tmp_path / "out", "--to", "paceline")


@pytest.mark.parametrize(
    "harm", ["no weight", "no moment", "no steps", "cut off", "another shape", "something"]
)
def test_s3_8_a_damaged_universal_checkpoint_is_refused_with_its_file(made, tmp_path, harm):
    other.zero(tmp_path / "ds", made[1], stage=2, ranks=2, adam=other.moments(made[1]))
    converted(tmp_path / "ds", tmp_path / "u", "--to", "deepspeed")
    folder = tmp_path / "u/global_step7_universal/zero/model.norm.weight"
    file = folder / "exp_avg.pt"
    if harm == "no weight":
        (folder / "fp32.pt").unlink()
    elif harm == "no moment":
        file.unlink()
    elif harm == "no steps":
        (folder / "step.pt").unlink()
        (folder.parent / "optimizer_state.pt").write_bytes(b"")
    elif harm == "cut off":
        os.truncate(file, file.stat().st_size - 50)
    elif harm == "another shape":
        torch.save({"param": torch.ones(3)}, file)
    else:
        torch.save({"param": 3}, file)
    with pytest.raises(CheckpointError, match=r"C012|M012") as found:
        call("convert", tmp_path / "u", tmp_path / "out")
    assert "model.norm.weight" in str(found.value) or "optimizer_state.pt" in str(found.value)
    assert not list(tmp_path.glob("*out*"))


def test_s3_8_a_folder_of_dcp_without_one_of_its_files_is_refused(made, tmp_path):
    other.as_dcp(tmp_path / "x", {"model": made[1], "optimizer": {"m": torch.ones(2)}})
    assert not problems(tmp_path / "x")
    file = tmp_path / "x/__0_0.distcp"
    os.truncate(file, file.stat().st_size - 50)
    (problem,) = problems(tmp_path / "x")
    assert "__0_0.distcp ends after" in problem["what"]
    file.unlink()
    with pytest.raises(PacelineError):
        call("convert", tmp_path / "x", tmp_path / "out", "--to", "torch")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 1), (3, 3)])
def test_s3_8_zero_becomes_full_weights_of_hugging_face(made, tmp_path, stage, ranks):
    path, state = made
    step = other.zero(tmp_path / "ds", state, stage=stage, ranks=ranks)
    facts = seen(tmp_path / "ds")
    assert facts["wrote"].startswith(f"DeepSpeed (ZeRO-{'3' if stage == 3 else '1 or 2'}), step 7")
    assert (facts["degrees"]["data"], facts["num_params"]) == (ranks, other.num_parameters(state))
    shutil.copy(path / "config.json", tmp_path / "ds")  # where a Trainer has it
    assert not problems(tmp_path / "ds")
    converted(tmp_path / "ds", tmp_path / "out", "--to", "safetensors")
    assert_same(weights_in(tmp_path / "out"), state)
    assert not problems(tmp_path / "out")
    os.remove(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(PacelineError, match=r"M012"):
        call("convert", tmp_path / "ds", tmp_path / "other", "--to", "safetensors")
    assert not (tmp_path / "other").exists()


def test_s0_18_a_file_of_zero_that_has_something_else_in_it_is_a_problem(made, tmp_path):
    step = other.zero(tmp_path / "ds", made[1], stage=2, ranks=2)
    torch.save({"a": torch.ones(2)}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (problem,) = problems(tmp_path / "ds")
    assert problem["code"] == "C012"
    assert "global_step7 is not laid out as deepspeed: it has no 'optim" in problem["what"]


@pytest.mark.parametrize("flat", [False, True])
def test_s3_8_a_universal_checkpoint_becomes_full_weights(made, tmp_path, flat):
    folder = other.universal(tmp_path / "global_step9_universal", made[1], flat=flat)
    assert seen(folder)["form"] == "deepspeed"
    converted(folder, tmp_path / "out.pt", "--to", "torch")
    assert_same(torch.load(tmp_path / "out.pt")["model"], made[1])
    shutil.rmtree(folder / "zero/model.norm.weight")
    with pytest.raises(CheckpointError, match=r"no fp32\.pt of model\.norm\.weight"):
        call("convert", folder, tmp_path / "new.pt", "--to", "torch")


@pytest.mark.parametrize(("tensor", "pipeline"), [(0, 0), (1, 1), (2, 1), (1, 2), (2, 2)])
def test_s3_8_a_megatron_llama_becomes_one_of_hugging_face(made, tmp_path, tensor, pipeline):
    path, state = made
    root = tmp_path / "mega"
    if tensor:
        other.legacy(root, state, tensor=tensor, pipeline=pipeline)
    else:
        other.torch_dist(root, state)
    assert seen(root)["wrote"].startswith("Megatron-LM")
    assert seen(root)["num_params"] == other.num_parameters(state)
    converted(root, tmp_path / "out", "--to", "safetensors")
    assert_same(weights_in(tmp_path / "out"), state)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    truth = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(model(tokens).logits, truth(tokens).logits)


def _rank(root, name):
    return root / "iter_0000005" / name / "model_optim_rng.pt"


def _edit_rank(root, name, change):
    saved = torch.load(_rank(root, name), weights_only=False)
    change(saved)
    torch.save(saved, _rank(root, name))


@pytest.mark.parametrize("has_swiglu", [True, False])
def test_s0_18_megatrons_legacy_model_is_unread_and_not_called_damaged(made, tmp_path, has_swiglu):
    other.legacy(tmp_path / "mega", made[1], tensor=1, pipeline=1)

    def change(saved):
        saved["model"] = {"language_model": {"embedding": {}, "encoder": {}}}
        if not has_swiglu:
            del saved["args"].swiglu

    (name,) = (each.name for each in (tmp_path / "mega/iter_0000005").glob("mp_rank_*"))
    _edit_rank(tmp_path / "mega", name, change)
    code, (result,) = printed("verify", tmp_path / "mega")
    assert (code, result["whole"]) == (5, None)
    (problem,) = result["problems"]
    assert problem["code"] == "C012"
    assert "layout not read" in problem["what"]
    assert "Megatron's legacy model" in problem["what"]
    lines = CliRunner().invoke(command, ["verify", str(tmp_path / "mega")]).stdout
    assert lines.startswith("UNREAD")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda saved: saved.update(iteration=4), "differ in iteration: 5 in mp_rank_00; 4 in"),
        (lambda saved: setattr(saved["args"], "hidden_size", 9), "differ in hidden_size"),
        (
            lambda saved: saved["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"),
            "mp_rank_01/model_optim_rng.pt has no decoder.layers.1.mlp.linear_fc2.weight",
        ),
        (
            lambda saved: saved["model"]["decoder.final_layernorm.weight"].add_(1e-3),
            "the copies of decoder.final_layernorm.weight differ, in mp_rank_00 and mp_rank_01",
        ),
    ],
)
def test_s0_18_a_rank_of_megatron_that_is_unlike_the_others_is_damage(made, tmp_path, change, says):
    other.legacy(tmp_path, made[1], tensor=2, pipeline=1)
    _edit_rank(tmp_path, "mp_rank_01", change)
    (problem,) = problems(tmp_path)
    assert problem["code"] == "M012"
    assert says in problem["what"]


@pytest.mark.parametrize("is_stacked", [True, False])
def test_s0_18_a_nan_in_megatrons_optimizer_is_damage(made, tmp_path, is_stacked):
    moment = torch.tensor([0.0, torch.nan])
    if is_stacked:
        other.torch_dist(tmp_path, made[1], moment=moment)
    else:
        other.legacy(tmp_path, made[1], tensor=2, pipeline=1)
        state = {"state": {0: {"exp_avg": moment}}}
        _edit_rank(tmp_path, "mp_rank_01", lambda saved: saved.update(optimizer=state))
    (problem,) = problems(tmp_path)
    assert problem["code"] == "C016"
    assert "exp_avg" in problem["what"]


def test_s0_18_a_pipeline_stage_that_megatron_wrote_and_is_not_there_is_damage(made, tmp_path):
    other.legacy(tmp_path, made[1], tensor=1, pipeline=1)
    (name,) = (each.name for each in (tmp_path / "iter_0000005").glob("mp_rank_*"))
    _edit_rank(
        tmp_path, name, lambda saved: setattr(saved["args"], "pipeline_model_parallel_size", 2)
    )
    (problem,) = problems(tmp_path)
    assert problem["code"] == "M012"
    assert "pipeline_model_parallel_size is 2, and files of 1 are there" in problem["what"]


def test_s0_18_a_newest_step_that_is_named_and_not_there_is_a_warning(made, tmp_path):
    other.legacy(tmp_path, made[1], tensor=1, pipeline=1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("60")
    code, (result,) = printed("verify", tmp_path)
    assert (code, result["whole"]) == (0, True)
    (warning,) = result["warnings"]
    assert "names iter_0000060, which is not there; iter_0000005 was looked at" in warning["what"]


def test_s3_8_a_megatron_gpt_2_becomes_one_of_hugging_face(tmp_path):
    import transformers

    truth = other.gpt2(tmp_path / "gpt2")
    root = other.legacy_gpt2(tmp_path / "mega", other.state_of(truth))
    converted(root, tmp_path / "out", "--to", "safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(model(tokens).logits, truth.eval()(tokens).logits)


def test_s3_8_accelerates_sharded_weights_are_read(made, tmp_path):
    folder = tmp_path / "state"
    other.as_dcp(folder / "pytorch_model_fsdp_0", {"model": made[1]})
    (folder / "random_states_0.pkl").touch()
    facts = seen(folder)
    assert (facts["kind"], facts["form"]) == ("accelerate", "dcp")
    converted(folder, tmp_path / "out.pt", "--to", "torch")
    assert_same(torch.load(tmp_path / "out.pt")["model"], made[1])


def test_s0_18_the_check_before_a_resume_reads_the_headers(folder, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{hf_config: {folder / 'config.json'}, weights: drawn}}\n" + JOB)
    args = (folder, job, (), None, None)
    assert verdict_of(*args).fit == "convertible"
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    said = verdict_of(*args)
    assert said.fit == "not"
    assert "M012: model.safetensors is not a whole safetensors file" in said.why[0]
    assert [each["where"] for each in problems(folder)] == [str(folder)]


def test_s3_8_a_megatron_model_of_another_family_is_refused_by_name(made, tmp_path):
    root = tmp_path / "mega"
    other.torch_dist(root, made[1], num_experts=8)
    with pytest.raises(CheckpointError, match=r"C012.*num_experts is 8"):
        call("convert", root, tmp_path / "out", "--to", "safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--to", "torch", "--ranks", "2"], "--ranks needs --to paceline"),
        (["--to", "safetensors", "--merge"], "--merge is of adapters"),
        (["--to", "safetensors", "--key", "model"], "--key is of files of torch"),
        (["--max-shard-size", "1GB"], "--max-shard-size needs --to safetensors"),
    ],
)
def test_s3_8_an_option_that_would_have_no_effect_is_refused(made, tmp_path, args, says):
    import click

    with pytest.raises(click.UsageError, match=says):
        call("convert", made[0], tmp_path / "out", *args)


def test_s3_8_what_is_said_to_be_another_form_is_refused_and_out_is_not_written_over(
    made, tmp_path
):
    with pytest.raises(CheckpointError, match="is not what --from torch reads"):
        call("convert", made[0], tmp_path / "out", "--from", "torch")
    (tmp_path / "mine.pt").write_text("mine")
    with pytest.raises(JobError, match="R002"):
        call("convert", made[0], tmp_path / "mine.pt", "--to", "torch")
    assert (tmp_path / "mine.pt").read_text() == "mine"


def test_a_run_from_another_programs_weights_names_them_and_the_command_that_converts_them(
    folder, tmp_path
):
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {{hf_config: {folder / 'config.json'}, weights: drawn}}\n" + JOB)
    job = read_job(file, ())
    with pytest.raises(JobError) as refused:
        find_source(folder, job, "local")
    (problem,) = refused.value.problems
    assert problem.what.startswith(f"{folder} is weights")
    assert f"`paceline checkpoint convert {folder} start`, and --from start" in (problem.fix or "")
    converted(folder, tmp_path / "start", "--to", "paceline")
    assert find_source(tmp_path / "start", job, "local") == tmp_path / "start/step-00000000"
