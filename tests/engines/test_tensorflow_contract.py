"""The TensorFlow trainer's contract, really done: it trains, stops early, exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.runs import start

SOURCE = Path(__file__).parents[2] / "src"

MODEL = """
import keras

def build_model():
    return keras.Sequential([
        keras.layers.Input((2,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)
    ])
"""

LOAD = """
import json, numpy as np, tensorflow as tf, keras
x = np.load("val.npz")["x"].astype("float32")
served = tf.saved_model.load("served").signatures
ours = keras.models.load_model("model.keras")(x).numpy()
whole = {name: np.abs(next(iter(each(x=tf.constant(x)).values())).numpy() - ours).max()
         for name, each in served.items()}
small = tf.lite.Interpreter(model_path="small.tflite")
small.resize_tensor_input(small.get_input_details()[0]["index"], x.shape)
small.allocate_tensors()
small.set_tensor(small.get_input_details()[0]["index"], x)
small.invoke()
off = np.abs(small.get_tensor(small.get_output_details()[0]["index"]) - ours).max()
print(json.dumps({"signatures": {k: float(v) for k, v in whole.items()}, "tflite": float(off)}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and points inside and outside a circle."""
    (tmp_path / "model.py").write_text(MODEL)
    random = np.random.default_rng(0)
    for name, count in (("train", 512), ("val", 128)):
        x = random.uniform(-1, 1, (count, 2)).astype(np.float32)
        y = (np.square(x).sum(1) < 0.6).astype(np.int64)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    return tmp_path


def contract(python: Path, folder: Path, training: dict[str, Any], **more: Any) -> dict[str, Any]:
    request = {
        "modelConfig": {"modelPath": "model.py"} | more.pop("model", {}),
        "dataConfig": {"trainPath": "train.npz", "valPath": "val.npz", "batchSize": 32},
        "trainingConfig": {"epochs": 8, "learningRate": 0.02} | training,
    } | more
    (folder / "request.json").write_text(json.dumps(request))
    command = f"{python} -m paceline contract tensorflow-trainer < request.json > answer.json"
    environment = {"PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "2"}
    start(["sh", "-c", command + " || true"], folder, python=python, environment=environment)
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer


@pytest.mark.engine("tensorflow", ran="the trainer's contract, 2 mirrored replicas; SavedModel")
def test_two_replicas_train_and_what_is_exported_is_the_model(python_with, folder):
    python = python_with("tensorflow-cpu", "pydantic", "msgspec")
    signatures = ["serving_default", "classify"]
    answer = contract(
        python,
        folder,
        {
            "epochs": 20,
            "distributionStrategy": "MirroredStrategy",
            "numReplicas": 2,
            "callbacks": ["csv"],
        },
        model={"modelType": "sequential"},
        exportConfig={
            "savedModelPath": "served",
            "tflitePath": "small.tflite",
            "servingSignatures": signatures,
        },
    )
    assert answer["status"] == "success", answer
    assert answer["worldSize"] == 2
    assert answer["metrics"]["epochsTrained"] == 20
    assert answer["metrics"]["valAccuracy"] > 0.85
    assert len(answer["history"]["loss"]) == 20
    assert answer["history"]["loss"][-1] < answer["history"]["loss"][0]
    output = start([str(python), "-c", LOAD], folder, python=python)
    off = json.loads(output.splitlines()[-1])
    assert set(signatures) <= set(off["signatures"])
    assert max(off["signatures"].values()) < 1e-5
    assert off["tflite"] < 1e-5


@pytest.mark.engine("tensorflow", ran="the trainer's contract: early stopping, TensorBoard, errors")
def test_it_stops_early_and_says_what_is_wrong(python_with, folder):
    python = python_with("tensorflow-cpu", "tensorboard", "pydantic", "msgspec")
    # A rate at which nothing is learned: the validation loss does not fall for five epochs.
    training = {"epochs": 60, "learningRate": 5.0, "callbacks": ["EarlyStopping", "TensorBoard"]}
    answer = contract(python, folder, training)
    assert answer["status"] == "early_stopped", answer
    assert answer["metrics"]["epochsTrained"] < 60
    assert answer["tensorboardLogDir"] == "tensorboard"
    assert list((folder / "tensorboard").rglob("events.*"))
    wrong = contract(python, folder, {}, model={"modelType": "subclassed"})
    assert wrong["status"] == "error"
    assert (
        "modelType is subclassed, and build_model() returned a sequential one" in wrong["message"]
    )
