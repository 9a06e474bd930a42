"""Trains a person's Keras model, in a process of its own: what it prints or breaks is its own.

    python -m paceline.contracts.skills.tensorflow_program TOLD    the request as JSON on stdin

Files go below the current folder: `model.keras`, and what the callbacks and the export write.
"""

import json
import math
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BEST, LOGS, BACKUP = "best.keras", "tensorboard", "backup"
_PATIENCE, _REDUCE_AFTER = 5, 3


def main(told: Path) -> None:
    """Train, export, tell."""
    asked = json.loads(sys.stdin.read())
    train, given = asked["trainingConfig"], asked["dataConfig"]
    keras.utils.set_random_seed(train["seed"])
    # Before anything uses a device: parts of the CPU are devices of their own.
    strategy = _strategy(train)
    x, y = _samples(given["trainPath"])
    held_out = None if given["valPath"] is None else _samples(given["valPath"])
    with strategy.scope():
        model = _compiled(asked, bool(np.issubdtype(y.dtype, np.integer)))
    history = model.fit(
        x,
        y,
        batch_size=given["batchSize"],
        epochs=train["epochs"],
        validation_data=held_out,
        callbacks=_callbacks(train["callbacks"]),
        verbose=2,
    )
    figures = {name: [float(v) for v in values] for name, values in history.history.items()}
    if not all(math.isfinite(value) for value in figures["loss"]):
        raise FloatingPointError(f"the loss is not finite: {figures['loss'][-1]}")
    model.save("model.keras")
    early = len(figures["loss"]) < train["epochs"] and "early_stopping" in train["callbacks"]
    said = {
        "status": "early_stopped" if early else "success",
        "history": figures,
        "model": "model.keras",
        "world_size": strategy.num_replicas_in_sync,
        "tensorboard": LOGS if "tensorboard" in train["callbacks"] else None,
    }
    told.write_text(json.dumps(said | _export(model, asked["exportConfig"])), encoding="utf-8")


def _strategy(train: dict[str, Any]) -> tf.distribute.Strategy:
    if train["distributionStrategy"] == "none":
        return tf.distribute.get_strategy()
    gpus, count = tf.config.list_physical_devices("GPU"), train["numReplicas"]
    if gpus or count is None:
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"CPU:{part}" for part in range(count)])


def _samples(path: str) -> tuple[np.ndarray, np.ndarray]:
    if path.endswith(".npz"):
        with np.load(path) as kept:
            return kept["x"], kept["y"]
    rows = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    y = rows[:, -1]
    return rows[:, :-1].astype(np.float32), y.astype(np.int64) if (y % 1 == 0).all() else y


def _compiled(asked: dict[str, Any], is_classes: bool) -> keras.Model:
    of = asked["modelConfig"]
    sys.path.insert(0, str(Path(of["modelPath"]).resolve().parent))
    made = runpy.run_path(of["modelPath"])
    if "build_model" not in made:
        raise NameError(f"{of['modelPath']} defines no build_model()")
    model = made["build_model"]()
    if not isinstance(model, keras.Model):
        raise TypeError(f"build_model() returned a {type(model).__name__}, not a keras.Model")
    kind = _kind(model)
    if of["modelType"] not in (None, kind):
        raise TypeError(f"modelType is {of['modelType']}, and build_model() returned a {kind} one")
    train = asked["trainingConfig"]
    rate = train["learningRate"]
    optimizer = {
        "adamw": lambda: keras.optimizers.AdamW(rate),
        "adam": lambda: keras.optimizers.Adam(rate),
        "sgd": lambda: keras.optimizers.SGD(rate, momentum=0.9),
        "rmsprop": lambda: keras.optimizers.RMSprop(rate),
    }[train["optimizer"]]()
    usual: Any = "mean_squared_error"
    if is_classes:
        usual = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=optimizer,
        loss=made.get("loss", usual),
        metrics=["accuracy"] if is_classes else [],
    )
    return model


def _kind(model: keras.Model) -> str:
    if isinstance(model, keras.Sequential):
        return "sequential"
    return "functional" if isinstance(model, keras.models.Functional) else "subclassed"


def _callbacks(names: list[str]) -> list[keras.callbacks.Callback]:
    known = {
        "early_stopping": lambda: keras.callbacks.EarlyStopping(
            patience=_PATIENCE, restore_best_weights=True
        ),
        "checkpoint": lambda: keras.callbacks.ModelCheckpoint(BEST, save_best_only=True),
        "tensorboard": lambda: keras.callbacks.TensorBoard(LOGS),
        "reduce_lr": lambda: keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=_REDUCE_AFTER),
        "csv": lambda: keras.callbacks.CSVLogger("history.csv"),
        "backup": lambda: keras.callbacks.BackupAndRestore(BACKUP),
    }
    return [known[name]() for name in names]


def _export(model: keras.Model, asked: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    wanted = asked["savedModelPath"] or (asked["tflitePath"] and ".for-tflite")
    if not wanted:
        return found
    archive = keras.export.ExportArchive()
    archive.track(model)
    shape = (None, *model.input_shape[1:])
    for name in asked["servingSignatures"]:
        archive.add_endpoint(
            name=name,
            fn=lambda x: model(x, training=False),
            input_signature=[tf.TensorSpec(shape, tf.float32, name="x")],
        )
    archive.write_out(wanted, verbose=False)
    if asked["savedModelPath"]:
        found["saved_model"] = wanted
    if asked["tflitePath"]:
        Path(asked["tflitePath"]).write_bytes(
            tf.lite.TFLiteConverter.from_saved_model(wanted).convert()
        )
        found["tflite"] = asked["tflitePath"]
        if not asked["savedModelPath"]:
            shutil.rmtree(wanted)
    return found


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(Path(sys.argv[1]))
