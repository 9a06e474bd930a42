import json
import os

os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": ["10.0.0.4:12345", "10.0.0.5:12345"]}, "task": {"type": "worker", "index": int(os.environ["RANK"])}}
)
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
    model.compile(optimizer="adam", loss="mse")
