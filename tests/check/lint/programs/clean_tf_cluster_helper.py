"""TF_CONFIG is written by one helper and the strategy made by another; who calls them is elsewhere."""

import json
import os

import tensorflow as tf


def make_strategy(kind):
    if kind == "many":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def describe_cluster(hosts, index):
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts.split(",")}, "task": task})
    return len(hosts.split(","))
