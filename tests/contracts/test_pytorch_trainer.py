"""The PyTorch trainer's contract really trains."""

import json
import math
import subprocess
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.contracts.skills import pytorch, run_skill
from paceline.errors import JobError
from paceline.runtime import epochs
from paceline.runtime.strategy import LossScaler

MODEL = """
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
"""
LINEAR = "from torch import nn\n\n\ndef build_model():\n    return nn.Linear(4, 1)\n"


def samples(path, count, seed):
    x = np.random.default_rng(seed).normal(size=(count, 4))
    np.savez(path, x=x, y=(x[:, 0] > 0).astype(int) + (x[:, 1] > 0))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    samples(tmp_path / "train.npz", 203, 0)  # no multiple of anything
    samples(tmp_path / "val.npz", 61, 1)
    return tmp_path


@pytest.fixture(autouse=True)
def same_process(request, monkeypatch):
    """The training's process is this one, which has imported torch; `own_process` leaves it."""
    if not request.node.get_closest_marker("own_process"):
        monkeypatch.setattr(pytorch.subprocess, "run", train_here)


def train_here(command, *, cwd, env, **_):
    said, code = "", 0
    with pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        here.setattr(sys, "path", [*sys.path])
        here.setattr(sys, "argv", command[command.index(epochs.__name__) :])
        try:
            epochs.main()
        except SystemExit as end:
            said, code = str(end.code), 1
        except Exception:  # noqa: BLE001 - as it would end a process
            said, code = traceback.format_exc(), 1
    return subprocess.CompletedProcess(command, code, stderr=said)


def asked(checkpoints=None, data=None, **training):
    return {
        "modelPath": "model.py",
        "dataConfig": {"trainPath": "train.npz", "valPath": "val.npz"} | (data or {}),
        "trainingConfig": {"epochs": 3, "learningRate": 0.02} | training,
        "checkpointConfig": checkpoints or {},
    }


def answer(request, folder):
    return run_skill("pytorch-trainer", json.dumps(request), source="standard input", folder=folder)


def losses(found):
    return [point["trainLoss"] for point in found["learningCurve"]]


@pytest.mark.own_process
def test_s2_8_it_learns_and_says_every_epoch(folder):
    found = answer(asked(epochs=6), folder)
    assert found["status"] == "success"
    assert [point["epoch"] for point in found["learningCurve"]] == [1, 2, 3, 4, 5, 6]
    assert losses(found)[-1] < 0.7 * losses(found)[0]
    assert found["metrics"]["valAccuracy"] > 0.6  # a third is chance
    assert found["metrics"]["epochsTrained"] == 6
    state = torch.load(folder / found["checkpointPath"], weights_only=True)
    assert state["epoch"] == 6


@pytest.mark.repeat  # what ranks read together is below, one process above
@pytest.mark.ranks
@pytest.mark.own_process
def test_s2_8_two_processes_train_as_one_does(folder):
    request = asked(gradientAccumulation=2, gradientClipping=1.0, scheduler="onecycle", epochs=2)
    one = answer(request, folder)
    request["trainingConfig"]["numProcesses"] = 2
    request["checkpointConfig"] = {"saveDir": "two"}
    two = answer(request, folder)
    assert two["worldSize"] == 2
    # Sums in another order: float32's 6e-8, times some hundred additions of a step.
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert two["metrics"]["valLoss"] == pytest.approx(one["metrics"]["valLoss"], rel=1e-5)


def test_s2_8_going_on_from_a_checkpoint_is_as_if_it_had_never_stopped(folder):
    request = asked(epochs=4, scheduler="cosine")
    whole = answer(request, folder)
    request["checkpointConfig"] = {"saveDir": "again", "resumeFrom": "checkpoints/epoch-2.pt"}
    rest = answer(request, folder)
    assert losses(rest) == losses(whole)[2:]
    assert rest["metrics"]["epochsTrained"] == 4


@pytest.mark.parametrize(
    ("before", "scheduler"),
    [
        # Each schedule is saved once and asked for once; the other pairs are repeats.
        *(("none", "cosine"), ("cosine", "onecycle"), ("onecycle", "step")),
        *(
            pytest.param(*pair, marks=pytest.mark.repeat)
            for pair in (
                *(("none", "step"), ("none", "onecycle"), ("cosine", "cosine")),
                *(("cosine", "step"), ("onecycle", "cosine"), ("onecycle", "onecycle")),
            )
        ),
    ],
)
def test_s2_8_a_resume_follows_the_schedule_of_its_own_request(folder, before, scheduler):
    answer(asked(epochs=2, learningRate=0.05, scheduler=before), folder)
    rest = asked({"resumeFrom": "checkpoints/epoch-1.pt"}, epochs=6, scheduler=scheduler)
    found = answer(rest, folder)
    whole = answer(asked(epochs=6, scheduler=scheduler), folder)
    rates = [[point["learningRate"] for point in each["learningCurve"]] for each in (found, whole)]
    assert found["status"] == "success"
    assert rates[0] == rates[1][1:]


@pytest.mark.parametrize("wanted", ["adam", "sgd", "rmsprop"])
def test_s2_8_a_resume_with_another_optimizer_is_refused_by_name(folder, capfd, wanted):
    answer(asked(epochs=1), folder)
    found = answer(asked({"resumeFrom": "checkpoints/epoch-1.pt"}, optimizer=wanted), folder)
    assert found["status"] == "error"
    assert (
        f"epoch-1.pt has the state of optimizer adamw, and trainingConfig.optimizer is {wanted}: "
        'ask for "optimizer": "adamw"'
    ) in found["message"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("torch.ones(8, 4), torch.ones(8).long()", "a tuple whose first sample is a Tensor"),
        ("torch.ones(8, 4)", "a Tensor whose first sample is a Tensor"),
        ("iter([])", "a list_iterator"),
        ("None", "a NoneType"),
    ],
)
def test_s2_8_load_data_that_returns_no_dataset_is_told_what_it_must_return(
    folder, capfd, returned, said
):
    own = f"\n\nimport torch\n\n\ndef load_data(path):\n    return {returned}\n"
    (folder / "model.py").write_text(MODEL + own)
    found = answer(asked(), folder)
    assert found["status"] == "error"
    assert f"load_data('train.npz') returned {said}: return a dataset" in found["message"]
    assert "TensorDataset(x, y)" in found["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_s2_8_early_stopping_ends_it_and_says_so(folder):
    found = answer(asked(epochs=500, learningRate=0.05, earlyStopping={"patience": 2}), folder)
    assert found["status"] == "early_stopped"
    curve = [point["valLoss"] for point in found["learningCurve"]]
    assert len(curve) < 500
    assert curve.index(min(curve)) == len(curve) - 3  # two epochs after the best
    assert torch.load(folder / found["bestCheckpointPath"], weights_only=True)["epoch"] == (
        len(curve) - 2
    )


def test_a_model_that_fails_is_an_answer_with_its_reason(folder):
    (folder / "model.py").write_text("def build_model():\n    raise ValueError('no weights')\n")
    found = answer(asked(), folder)
    assert found["status"] == "error"
    assert "no weights" in found["message"]
    assert found["checkpointPath"] == ""


def test_a_loss_that_is_not_finite_is_an_error(folder):
    found = answer(asked(learningRate=1e38, optimizer="sgd"), folder)
    assert found["status"] == "error"
    assert "lower learningRate" in found["message"]


def test_a_gradient_that_is_not_finite_is_an_error_though_the_loss_is(folder):
    text = "\n\ndef loss(outputs, targets):\n    return (0 * outputs).square().sum().sqrt()\n"
    (folder / "model.py").write_text(MODEL + text)
    found = answer(asked(), folder)
    assert found["status"] == "error"
    assert "epoch 1: the gradient norm is nan" in found["message"]


@pytest.mark.parametrize(
    ("saved", "scale"),
    [
        (LossScaler(initial=4.0).state_dict(), {"scale": 4.0, "num_good": 0}),
        ({}, LossScaler().state_dict()),  # of a training in another precision
    ],
)
def test_fp16_goes_on_with_the_loss_scale_of_any_checkpoint(tmp_path, saved, scale):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    training = _training(count=1)
    training.asked["trainingConfig"]["epochs"] = 2
    training.trainer = SimpleNamespace(
        model=model, optimizer=optimizer, scaler=LossScaler(), device=torch.device("cpu")
    )
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": saved}
    state |= {"scheduler": None, "epoch": 1, "best": 0.5, "since_best": 0}
    torch.save(state, tmp_path / "epoch-1.pt")
    epochs._resume(training, tmp_path / "epoch-1.pt")
    assert training.trainer.scaler.state_dict() == scale


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        ("none", [0.02, 0.02, 0.02]),
        ("step", [0.02, 0.002, 0.0002]),
        ("cosine", [0.02, 0.015, 0.005]),  # half of 1 + cos(0), cos(60), cos(120 degrees)
    ],
)
def test_an_epochs_learning_rate_is_the_one_it_was_trained_with(folder, scheduler, rates):
    curve = answer(asked(scheduler=scheduler), folder)["learningCurve"]
    assert [point["learningRate"] for point in curve] == pytest.approx(rates)


@pytest.mark.parametrize("place", ["/proc/x", "train.npz", "train.npz/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_an_epoch(folder, place):
    with pytest.raises(JobError, match=f"{place} cannot be written") as refused:
        answer(asked(checkpoints={"saveDir": place}), folder)
    assert [problem.where for problem in refused.value.problems] == ["checkpointConfig.saveDir"]


@pytest.mark.own_process
def test_a_checkpoint_that_cannot_be_written_later_is_said_without_a_traceback(folder, capfd):
    (folder / "checkpoints" / "epoch-1.pt").mkdir(parents=True)
    found = answer(asked(), folder)
    assert found["status"] == "error"
    assert "checkpoints/epoch-1.pt cannot be written: is a directory" in found["message"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"junk of nobody", "is no checkpoint: PyTorch cannot read it"),
        (b"", "is no checkpoint: PyTorch cannot read it"),
        (b"\x80\x02.", "is no checkpoint: PyTorch cannot read it"),
        ({"model": {}}, "is no checkpoint of this trainer: it has no optimizer, scaler"),
        ([1, 2], "is no checkpoint of this trainer: it has no model"),
    ],
    ids=["junk", "empty", "pickle", "other", "list"],
)
def test_a_file_that_is_no_checkpoint_is_said_to_be_none(folder, capfd, content, said):
    if isinstance(content, bytes):
        (folder / "x.pt").write_bytes(content)
    else:
        torch.save(content, folder / "x.pt")
    found = answer(asked(checkpoints={"resumeFrom": "x.pt"}), folder)
    assert f"x.pt {said}" in found["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_of_another_model_names_what_differs(folder):
    answer(asked(epochs=1), folder)
    (folder / "model.py").write_text(LINEAR)
    found = answer(asked(checkpoints={"resumeFrom": "checkpoints/epoch-1.pt"}), folder)
    assert "epoch-1.pt is of another model or optimizer: " in found["message"]
    assert "Missing key(s)" in found["message"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build_model(:\n    pass\n", "model.py, line 1 is no Python: invalid syntax"),
        (
            "import nowhere_to_be_found\nbuild_model = 1\n",
            "model.py, line 1: ModuleNotFoundError: No module named",
        ),
        (
            "x = 1\nx[0]\nbuild_model = 1\n",
            "model.py, line 2: TypeError: 'int' object is not subscriptable",
        ),
        ("def build_model():\n    return 3\n", "build_model() returned a int"),
    ],
    ids=["syntax", "import", "raises", "no-module"],
)
def test_a_models_file_that_is_wrong_is_named_with_its_line(folder, capfd, text, said):
    (folder / "model.py").write_text(text)
    found = answer(asked(), folder)
    assert found["status"] == "error"
    assert said in found["message"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modelPath": "nowhere.py"}, "there is no file nowhere.py"),
        ({"dataConfig": {"trainPath": "nowhere.npz"}}, "there is no file nowhere.npz"),
        ({"checkpointConfig": {"resumeFrom": "x.pt"}}, "there is no checkpoint x.pt"),
        (
            {"dataConfig": {"trainPath": "train.npz"}, "trainingConfig": {"epochs": 1,
             "earlyStopping": {"patience": 1}}},
            "there is no dataConfig.valPath",
        ),
        ({"trainingConfig": {"epochs": 1, "numProcesses": 3}}, "batchSize 33"),
    ],
)  # fmt: skip
def test_a_wrong_path_or_pair_is_refused_before_anything_starts(change, said, folder):
    with pytest.raises(JobError, match=said):
        answer(asked() | change, folder)


def test_s2_8_a_models_file_without_build_model_is_refused_before_anything_starts(folder):
    (folder / "model.py").write_text("from torch import nn\n\nNET = nn.Linear(4, 1)\n")
    with pytest.raises(JobError, match=r"model.py defines no build_model\(\)") as caught:
        answer(asked(), folder)
    assert caught.value.problems[0].where == "modelPath"
    assert "define build_model()" in caught.value.problems[0].fix


def test_targets_that_are_no_whole_numbers_are_fitted_and_have_no_accuracy(folder):
    (folder / "model.py").write_text(LINEAR)
    x = np.random.default_rng(2).normal(size=(64, 4))
    rows = np.column_stack([x, x @ [1.0, -2.0, 0.5, 0.0] + 0.25])
    np.savetxt(folder / "line.csv", rows, delimiter=",", header="a,b,c,d,target", comments="")
    found = answer(
        asked(epochs=60, learningRate=0.05, data={"trainPath": "line.csv", "valPath": None}), folder
    )
    assert found["metrics"]["trainLoss"] < 0.01  # from 5
    assert "trainAccuracy" not in found["metrics"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("1,2,3,4,7", "targets are the classes 7 to 7 in this batch, and the model has 3 outputs"),
        ("1,2,3,4,0.5", "the model has 3 outputs a sample and 1 target"),
        ("1,2,3,4,nan", "rows.csv has targets that are not finite"),
        ("1,2,3,4,0\n1,2,0", "columns changed from 5 to 3 at row 2"),
    ],
    ids=["class", "number", "nan", "short row"],
)
def test_s2_8_targets_that_the_model_cannot_fit_are_named(folder, capfd, rows, said):
    (folder / "rows.csv").write_text(f"a,b,c,d,target\n{rows}\n")
    found = answer(asked(data={"trainPath": "rows.csv", "valPath": None}), folder)
    assert found["status"] == "error"
    assert said in found["message"]
    assert "usecols" not in found["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_samples_of_every_rank_together_are_all_samples_once():
    for world in (1, 2, 3, 7):
        given = _training(count=50)
        of_ranks = [epochs.steps_of(given, rank, world) for rank in range(world)]
        counted = sorted(
            sample
            for steps in of_ranks
            for _, batches in steps
            for batch in batches
            for sample in batch
        )
        assert counted == list(range(50))
        for step in zip(*of_ranks, strict=True):  # all ranks take the same steps
            assert len({(num_samples, len(batches)) for num_samples, batches in step}) == 1
            assert step[0][0] == sum(len(batch) for _, batches in step for batch in batches)


def test_an_epoch_has_an_order_of_its_own():
    training = _training(count=50)
    orders = []
    for training.epoch in (0, 1, 0):
        orders.append([step[1] for step in epochs.steps_of(training, 0, 1)])
    assert orders[0] == orders[2] != orders[1]


def _training(*, count):
    data = torch.utils.data.TensorDataset(torch.zeros(count, 1))
    wanted = {"seed": 0, "gradientAccumulation": 2, "mixedPrecision": False}
    return epochs.Training(
        asked={"trainingConfig": wanted, "dataConfig": {"batchSize": 16}},
        trainer=None,
        loss=torch.nn.functional.mse_loss,
        scheduler=None,
        train_data=data,
        val_data=None,
        best=math.inf,
    )
