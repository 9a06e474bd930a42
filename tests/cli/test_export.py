"""`paceline export`, from a run's folder to a folder that transformers loads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click import UsageError
from click.testing import CliRunner

pytest.importorskip("transformers")
from tests.prepare.conftest import make_tokenizer
from tests.runtime.exported import write_base, write_run

from paceline.cli.export import command
from paceline.errors import CheckpointError, JobError
from paceline.launch import export as launch_export
from paceline.record.conversion import LogitsCheck
from paceline.record.events import Evaluated
from paceline.record.find_checkpoints import checkpoint_of_run

DECODER = "{decoder: {layers: 2, hidden: 32, heads: 4}}"


def call(*args: object) -> str:
    """Standard output."""
    done = CliRunner().invoke(command, [str(arg) for arg in args], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.filterwarnings("ignore")
def test_a_run_from_trained_weights_is_exported_checked_and_described(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = write_base(tmp_path / "base", "llama")
    make_tokenizer(base)
    run = write_run(tmp_path, "{pretrained: base, tokenizer: bytes}")
    run.events_file.write_bytes(
        b"".join(
            msgspec.json.encode(Evaluated(step=step, loss=loss, seconds=1.0)) + b"\n"
            for step, loss in ((10, 3.5), (20, 3.25), (30, 3.0))
        )
    )
    done = json.loads(call(run.path, tmp_path / "out", "--json"))
    assert (done["kind"], done["step"], done["dtype"]) == ("model", 20, "bfloat16")
    assert done["check"]["samples"] == 8
    assert done["check"]["problem"] is None
    assert done["licence"] == "apache-2.0"
    out = tmp_path / "out"
    names = {Path(each).name for each in done["converted"]["files"]}
    assert names == {path.name for path in out.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "LICENSE", "README.md"}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == "torch.bfloat16"
    assert AutoTokenizer.from_pretrained(out)("hello")["input_ids"]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert run.info().weights_digest in card
    assert "| evaluation | 3.5000 | step 10 | 3.2500 | step 20 |" in card
    assert "logits of 8 samples (held-out)" in card
    assert not list(tmp_path.glob(".*unfinished"))


def test_an_export_without_a_check_says_so_and_nothing_is_overwritten(tmp_path: Path):
    run = write_run(tmp_path, DECODER)
    told = call(run.path, "--no-check", "--dtype", "float16")
    out = run.path / "export-step-00000020"
    assert f"exported  {out}" in told
    assert "not made: it was not asked for (--no-check)" in told
    assert "licence to be filled in" in told
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert "tokens are bytes" in (out / "README.md").read_text()
    with pytest.raises(JobError, match=r"R002: .* is there already"):
        call(run.path, "--no-check")


def test_the_card_of_adapters_has_their_scale_and_no_path_of_this_machine(tmp_path: Path):
    make_tokenizer(write_base(tmp_path / "base", "llama"))
    run = write_run(tmp_path, "{pretrained: base, tokenizer: bytes}", adapter=True)
    call(run.path, tmp_path / "out", "--no-check")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| lora, rank 4, alpha 8, multiplied by alpha / rank, targets all, dropout 0 |" in card
    assert "| precision of the products | fp32 |" in card
    assert "| auto |" not in card
    assert 'from_pretrained("BASE")' in card
    assert str(tmp_path) not in card


def test_what_is_not_the_runs_model_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path, DECODER)

    def differs(asked: object, folder: Path) -> LogitsCheck:
        assert (folder / "model.safetensors").is_file()
        problem = launch_export._own_program(run, folder, "a test").problems[0]
        return LogitsCheck(problem=problem)

    monkeypatch.setattr(launch_export, "_compare", differs)
    with pytest.raises(CheckpointError, match="a test"):
        call(run.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*unfinished"))


def test_what_cannot_be_exported_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = write_run(tmp_path, DECODER)
    out = tmp_path / "out"
    with pytest.raises(JobError, match="complete ones are of steps: 20"):
        call(run.path, out, "--step", 7)
    with pytest.raises(JobError, match="no checkpoint with an evaluation loss"):
        call(run.path, out, "--best")
    with pytest.raises(JobError, match="no adapters, so there is nothing to merge"):
        call(run.path, out, "--merge")
    with pytest.raises(UsageError, match="give one of them"):
        call(run.path, out, "--step", 20, "--best")
    with pytest.raises(UsageError, match="--max-shard-size"):
        call(run.path, out, "--max-shard-size", "many")
    with pytest.raises(JobError, match="R003"):
        call(tmp_path, out)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(JobError, match=r"the export takes .* and .* has 1000 B free"):
        call(run.path, out)
    assert not out.exists()


def test_the_checkpoint_is_the_newest_that_of_a_step_or_the_best(tmp_path: Path):
    from tests.record.test_tensors import write

    from paceline.record.checkpoints import Manifest, commit, hash_file

    for step, loss in ((10, 2.0), (20, 1.0), (30, None)):
        made = write(tmp_path / "checkpoints", step)
        files = {path.name: hash_file(path) for path in made.glob("[_t]*")}
        made.rename(tmp_path / "moved")
        manifest = Manifest(step=step, world_size=2, files=files, held_out_loss=loss)
        commit(tmp_path / "moved", made, manifest)
    assert checkpoint_of_run(tmp_path).name == "step-00000030"
    assert checkpoint_of_run(tmp_path, step=10).name == "step-00000010"
    assert checkpoint_of_run(tmp_path, best=True).name == "step-00000020"


def test_a_program_of_ones_own_has_a_state_dict_alone(tmp_path: Path):
    run = write_run(tmp_path, DECODER)
    text = run.job_file.read_text()
    run.job_file.write_text(text.replace("program: null", "program: mine:train"))
    with pytest.raises(JobError, match=r"made by mine:train.*\n.*\n.*--to torch"):
        call(run.path, tmp_path / "out")


def test_adapters_beside_quantised_weights_are_not_compared_with_those_beside_whole_ones(
    tmp_path: Path,
):
    write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path, "{pretrained: base, tokenizer: bytes}", adapter=True)
    asked = launch_export.plan_export(run, checkpoint_of_run(run.path), tmp_path / "out")
    assert asked.conversion.adapters is not None
    adapters = replace(asked.conversion.adapters, quantised=True)
    asked = replace(asked, conversion=replace(asked.conversion, adapters=adapters))
    found = launch_export._compare(asked, tmp_path)
    assert (found.samples, "in NF4" in found.not_made) == (0, True)


@pytest.mark.parametrize(
    ("named", "number"), [("<pad>", 3), ({"content": "<pad>"}, 3), (None, None)]
)
def test_an_exported_classifier_knows_the_padding_of_its_tokenizer(tmp_path: Path, named, number):
    config = {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": named}))
    added = {"added_tokens": [{"id": 3, "content": "<pad>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    launch_export._pad_classifier(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == number
