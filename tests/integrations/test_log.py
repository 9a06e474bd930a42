"""`paceline.log`: a line for each call of rank 0, and nothing anywhere else."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest

import paceline
from paceline.integrations import log as module


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """The lines so far."""
    path = tmp_path / "logged.jsonl"
    monkeypatch.setenv("PACELINE_LOG", str(path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(module, "_WRITER", module._Writer())

    def read():
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read


def test_numbers_steps_and_checkpoints_are_lines(logged):
    paceline.log(loss=2.0, step=10, steps=100)
    paceline.log({"reward/mean": 0.5}, loss=1.5)
    paceline.log(eval_loss=1.2)
    paceline.log(checkpoint="out/last.pt")
    lines = logged()
    assert [line["step"] for line in lines] == [10, 10, 10, 10]
    assert lines[0]["steps"] == 100
    assert lines[1]["values"] == {"reward/mean": 0.5, "loss": 1.5}
    assert lines[3]["checkpoint"] == "out/last.pt"


def test_calls_count_up_where_no_step_was_ever_given(logged):
    for loss in (2.0, 1.5):
        paceline.log(loss=loss)
    paceline.log(eval_loss=1.2)
    assert [line["step"] for line in logged()] == [1, 2, 2]


def test_nan_is_json_and_a_tensor_is_a_number(logged):
    class Tensor:
        def __float__(self):
            return 0.25

    paceline.log(loss=float("nan"), aux=Tensor())
    assert logged()[0]["values"] == {"loss": None, "aux": 0.25}


@pytest.mark.parametrize(
    "wrong",
    [{"loss": [1.0]}, {"step": "7"}, {"step": 1.5}, {"step": -1}, {"steps": 2**60}],
    ids=str,
)
def test_what_cannot_be_recorded_is_said_once_and_the_training_goes_on(logged, capsys, wrong):
    paceline.log(**{"loss": 1.0, **wrong})
    paceline.log(**{"loss": 1.0, **wrong})
    paceline.log(loss=2.0, step=3)
    assert [line["values"]["loss"] for line in logged()] == [2.0]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("this call is not recorded; training continues")


def test_a_step_may_be_any_whole_number(logged):
    paceline.log(loss=1.0, step=numpy.int64(5))
    assert logged()[0]["step"] == 5


def test_other_ranks_and_scripts_without_a_run_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LOG", str(tmp_path / "logged.jsonl"))
    monkeypatch.setenv("RANK", "1")
    paceline.log(loss=1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("PACELINE_LOG")
    paceline.log(loss=1.0)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_never_ends_the_training(
    tmp_path, logged, monkeypatch, capsys
):
    monkeypatch.setenv("PACELINE_LOG", str(tmp_path / "gone" / "logged.jsonl"))
    paceline.log(loss=1.0)
    paceline.log(loss=1.0)
    assert capsys.readouterr().err.count("training continues") == 1


def test_it_imports_nothing_heavy():
    code = "import sys, paceline; print({'torch', 'msgspec', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_trainers_callback_gives_steps_numbers_and_checkpoints(tmp_path, logged):
    transformers = pytest.importorskip("transformers")
    from paceline.integrations.transformers import PacelineCallback

    callback = PacelineCallback()
    arguments = SimpleNamespace(output_dir=str(tmp_path / "out"))
    state = transformers.TrainerState(global_step=3, max_steps=6, is_world_process_zero=True)
    callback.on_step_end(arguments, state, None)
    callback.on_log(arguments, state, None, logs={"loss": 2.0, "learning_rate": 1e-4, "epoch": 1.0})
    callback.on_log(arguments, state, None, logs={"eval_loss": 1.0})
    callback.on_log(arguments, state, None, logs={"train_runtime": 9.0, "train_loss": 1.5})
    callback.on_save(arguments, state, None)
    lines = logged()
    assert [line["step"] for line in lines] == [3] * 4
    assert lines[1]["values"] == {"loss": 2.0, "learning_rate": 1e-4, "epoch": 1.0}
    assert lines[2]["values"] == {"eval_loss": 1.0}
    assert lines[3]["checkpoint"] == str(tmp_path / "out" / "checkpoint-3")


def test_lightnings_callback_gives_steps_numbers_and_checkpoints(logged, monkeypatch):
    lightning = SimpleNamespace(Callback=object, LightningModule=object, Trainer=object)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=lightning))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", lightning)
    monkeypatch.delitem(sys.modules, "paceline.integrations.lightning", raising=False)
    from paceline.integrations.lightning import PacelineCallback

    trainer = SimpleNamespace(
        is_global_zero=True,
        sanity_checking=False,
        global_step=2,
        log_every_n_steps=2,
        estimated_stepping_batches=10,
        logged_metrics={"train_loss": 2.0, "val_loss": 9.0},
        callback_metrics={"val_loss": 1.0, "train_loss": 2.0},
        checkpoint_callback=SimpleNamespace(last_model_path="", best_model_path="/out/best.ckpt"),
    )
    callback = PacelineCallback()
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_validation_end(trainer, None)
    trainer.global_step = 3
    callback.on_train_batch_end(trainer, None, None, None, 1)
    lines = logged()
    assert [(line["step"], line["values"]) for line in lines] == [
        (2, {"train_loss": 2.0}),
        (2, {}),
        (2, {"val_loss": 1.0}),
        (3, {}),
    ]
    assert lines[0]["steps"] == 10
    assert lines[1]["checkpoint"] == "/out/best.ckpt"
