"""The engineer's input context as a job."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from paceline import units
from paceline.catalog.load import accelerator_named, load_accelerators
from paceline.contracts.reading.translation import ContractText, Translation
from paceline.errors import JobError, Problem
from paceline.job import Job
from paceline.job.length import Length, SourceSize
from paceline.profile import resolve_profile

KEYS: Mapping[str, Mapping[str, str]] = {
    "modelConfig": {"path": "text", "size": "text", "framework": "text"},
    "dataConfig": {
        "path": "text",
        "size": "text",
        "sharding": "text",
        "sequenceLength": "a whole number",
    },
    "clusterConfig": {
        "numNodes": "a whole number",
        "gpusPerNode": "a whole number",
        "networkBandwidth": "text",
        "gpuType": "text",
        "gpuMemory": "text",
    },
    "trainingConfig": {
        "batchSize": "a whole number",
        "epochs": "a whole number",
        "parallelismStrategy": "text",
        "optimizer": "text",
        "learningRate": "a number",
        "steps": "a whole number",
    },
}
"""Section -> key -> its kind. `sequenceLength`, `gpuType`, `gpuMemory`, `optimizer`, `learningRate`
and `steps` are additions: the contract has no place for what they say."""

_REQUIRED = ("modelConfig", "dataConfig", "clusterConfig")

ASSUMED_ACCELERATOR = "H100-SXM"
_ASSUMED_SEQ_LEN = 4096
_ASSUMED_BATCH = 256
_ASSUMED_STEPS = 1000
_SIZE_ROUNDED = 0.1
"""How far a model's size may be from its parameters: 7B is 6.74B, 8B is 8.03B. A guess."""

_BYTES_PER_TOKEN = 4.0
"""Bytes of a token of English text with a vocabulary of about 100,000: a guess, tokenizers differ
by half."""

_NODE, _NODES = "ranks of a node", "nodes"
"""Degrees that a strategy names without a number."""

_STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "auto": {},
    "data": {"tensor": 1, "pipeline": 1, "context": 1},
    "ddp": {"sharding": "none", "tensor": 1, "pipeline": 1, "context": 1},
    "zero-1": {"sharding": "zero1", "tensor": 1, "pipeline": 1},
    "zero-2": {"sharding": "zero2", "tensor": 1, "pipeline": 1},
    "zero-3": {"sharding": "full", "tensor": 1, "pipeline": 1},
    "fsdp": {"sharding": "full", "tensor": 1, "pipeline": 1},
    "hsdp": {"sharding": "hybrid", "tensor": 1, "pipeline": 1},
    "tensor": {"tensor": _NODE, "pipeline": 1},
    "pipeline": {"tensor": 1, "pipeline": _NODES},
    "hybrid-3d": {"tensor": _NODE, "pipeline": _NODES},
}
"""Strategy -> what it fixes of the layout."""

_OTHER_NAMES = {
    "data-parallel": "data",
    "full-shard": "fsdp",
    "hybrid-shard": "hsdp",
    "model": "tensor",
    "hybrid": "hybrid-3d",
    "3d": "hybrid-3d",
}

_NOT_HERE = {
    "local-sgd": "ranks that average weights every few steps are another algorithm with another "
    "result: no engine that Paceline knows runs it",
    "diloco": "an outer optimizer over replicas that train alone is another algorithm with another "
    "result (arXiv:2311.08105): torchft has it, Paceline does not run it",
    "parameter-server": "asynchronous workers around a parameter server are not reproducible, and "
    "no engine that Paceline knows runs them: TensorFlow's ParameterServerStrategy does",
    "asynchronous": "updates that do not wait for each other are not reproducible, and no engine "
    "that Paceline knows runs them",
    "decentralized": "gossip between neighbours is another algorithm with another result: no "
    "engine that Paceline knows runs it",
}
"""What the contract's prose names and nothing here trains with -> why."""


def job_of_input_context(contract: ContractText, overrides: Sequence[str]) -> Translation:
    """The job that a plan is asked for in the engineer's contract."""
    made = Translation(contract=contract)
    for name in contract.value:
        if name not in KEYS:
            made.unknown(name, name, list(KEYS))
    sections = {
        name: made.section(name, keys, required=name in _REQUIRED) for name, keys in KEYS.items()
    }
    model, data, cluster, train = (sections[name] for name in KEYS)
    made.set("name", "contract")
    _model(made, model, overrides)
    seq_len = _data(made, data, overrides)
    nodes, per_node = _cluster(made, cluster, overrides)
    _train(made, train, data, seq_len, nodes * per_node)
    _strategy(made, train, nodes, per_node)
    return made


def is_set(overrides: Sequence[str], *keys: str) -> bool:
    """Whether `--set` gives one of these keys, or something under them.

    >>> is_set(["model.preset=llama-3-8b"], "model")
    True
    """
    given = [each.partition("=")[0].strip() for each in overrides]
    return any(each == key or each.startswith(f"{key}.") for each in given for key in keys)


def _model(made: Translation, model: Mapping[str, Any], overrides: Sequence[str]) -> None:
    framework = model.get("framework", "pytorch").lower()
    if framework not in ("pytorch", "torch"):
        made.note(
            f"modelConfig.framework is {framework}: memory and time are estimated for PyTorch's "
            "way of holding the same model"
        )
    if is_set(overrides, "model"):
        made.set("model", {})
        return
    path, size = model.get("path"), model.get("size")
    count = None
    if size is not None:
        count = made.read("modelConfig.size", size, units.parse_count, "7B or 350M")
    found = None if path is None else _model_at(made, path)
    config = (found or {}).get("hf_config")
    if size is not None and config is not None and not (made.contract.folder / config).is_file():
        made.note(
            f"modelConfig.path {path} is not on this machine: the model is one of {size} in size, "
            "with the usual shape"
        )
        found = None
    if found is not None:
        made.set("model", found)
    elif size is not None:
        if count is not None:
            made.set("model.size", size)
    else:
        made.wrong(
            "modelConfig",
            "`modelConfig` says neither the model's path nor its size",
            'add "size": "7B", or "path" with a config.json, a preset\'s name or module:function',
            code="J020",
        )


def check_size(value: Mapping[str, Any], job: Job, source: str) -> Iterator[Problem]:
    """A size that is not that of the model at the path, which is the one that is planned."""
    size = value["modelConfig"].get("size")
    model = job.spec.model
    if size is None or model.size is not None or model.factory is not None:
        return
    try:
        count = resolve_profile(job).num_parameters
    except JobError:  # the plan says what is wrong with the model
        return
    if abs(units.parse_count(size) / count - 1) > _SIZE_ROUNDED:
        path = value["modelConfig"].get("path")
        yield Problem(
            code="J023",
            what=f"modelConfig.size is {size}, and the model of modelConfig.path {path} has "
            f"{units.format_count(count)} parameters: the plan is of that model",
            where=f"modelConfig.size, {source}",
            fix="correct the size, or leave out the one that is not meant",
        )


def _model_at(made: Translation, path: str) -> dict[str, str]:
    """A factory, a config.json, a folder with one, or else the name of a preset."""
    if ":" in path and "/" not in path:
        return {"factory": path}
    here = made.contract.folder / path
    if path.endswith(".json"):
        return {"hf_config": path}
    if here.is_dir() or "/" in path:
        return {"hf_config": f"{path.rstrip('/')}/config.json"}
    return {"preset": path}


def _data(made: Translation, data: Mapping[str, Any], overrides: Sequence[str]) -> int:
    path = data.get("path")
    if path is not None:
        made.set("data.path", path)
    elif not is_set(overrides, "data.path", "data.corpus"):
        made.set("data.path", "data")
        made.note("dataConfig.path is missing: the job reads `data`, which a plan does not open")
    if data.get("sharding") is not None:
        made.note(
            f"dataConfig.sharding is {data['sharding']}: here every data rank reads its own "
            "samples of one seeded order, without shards on disk"
        )
    seq_len = data.get("sequenceLength")
    if seq_len is None:
        made.note(f"dataConfig.sequenceLength is missing: {_ASSUMED_SEQ_LEN} tokens assumed")
        seq_len = _ASSUMED_SEQ_LEN
    made.set("data.seq_len", seq_len)
    return int(seq_len)


def _cluster(
    made: Translation, cluster: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[int, int]:
    kind, memory = cluster.get("gpuType"), cluster.get("gpuMemory")
    if kind is not None:
        kind = _of_memory(kind, memory)
        made.set("cluster.accelerator", kind)
    elif not is_set(overrides, "cluster.accelerator"):
        made.set("cluster.accelerator", ASSUMED_ACCELERATOR)
        made.note(
            f"clusterConfig.gpuType is missing: {ASSUMED_ACCELERATOR} assumed; give it, or "
            "--set cluster.accelerator=..."
        )
    nodes = cluster.get("numNodes")
    if nodes is None:
        made.note("clusterConfig.numNodes is missing: 1 node assumed")
    made.set("cluster.nodes", nodes or 1)
    per_node = cluster.get("gpusPerNode")
    if per_node is None:
        made.note("clusterConfig.gpusPerNode is missing: what is usual for the accelerator")
    else:
        made.set("cluster.per_node", per_node)
    network = cluster.get("networkBandwidth")
    if network is not None:
        rate = made.read(
            "clusterConfig.networkBandwidth", network, units.parse_bytes_per_s, "100Gbps"
        )
        if rate is not None:
            made.set("cluster.network", network)
    if memory is not None:
        size = made.read("clusterConfig.gpuMemory", memory, units.parse_bytes, "80GB")
        if size is not None:
            made.set("cluster.memory", memory)
    return nodes or 1, per_node or 8


def _of_memory(kind: str, memory: object) -> str:
    """The accelerator that a name without its memory means: A100 with 80GB is A100-80."""
    known, size = load_accelerators(), re.match(r"\s*(\d+)\s*Gi?B\s*$", str(memory), re.IGNORECASE)
    if size is None or accelerator_named(kind, known) is not None:
        return kind
    found = accelerator_named(f"{kind.strip()}-{size[1]}GB", known)
    return kind if found is None else found.name


def _train(
    made: Translation,
    train: Mapping[str, Any],
    data: Mapping[str, Any],
    seq_len: int,
    ranks: int,
) -> None:
    batch = train.get("batchSize")
    if batch is None:
        batch = ceil(max(_ASSUMED_BATCH, ranks) / ranks) * ranks
        made.note(f"trainingConfig.batchSize is missing: {batch} samples a step assumed")
    made.set("train.global_batch", batch)
    for key, name in (("optimizer", "optimizer"), ("learningRate", "learning_rate")):
        if key in train:
            made.set(f"train.{name}", train[key])
    steps = train.get("steps") or _steps(made, train, data, seq_len, batch)
    made.set("train.steps", steps)


def _steps(
    made: Translation, train: Mapping[str, Any], data: Mapping[str, Any], seq_len: int, batch: int
) -> int:
    epochs, size = train.get("epochs"), data.get("size")
    if size is None:
        made.note(f"neither dataConfig.size nor steps are given: {_ASSUMED_STEPS} steps assumed")
        return _ASSUMED_STEPS
    num_bytes = made.read("dataConfig.size", size, units.parse_bytes, "500GB")
    if num_bytes is None:
        return _ASSUMED_STEPS
    if epochs is None:
        made.note("trainingConfig.epochs is missing: 1 assumed")
    samples = num_bytes / _BYTES_PER_TOKEN / seq_len
    steps: int = max(1, ceil((epochs or 1) * samples / batch))
    source = SourceSize(name="dataConfig", samples=max(1, round(samples)))
    made.length = Length(
        steps=steps, global_batch=batch, epochs=float(epochs or 1), sources=(source,)
    )
    made.note(
        f"{size} of text are {units.format_count(num_bytes / _BYTES_PER_TOKEN)} tokens at "
        f"{_BYTES_PER_TOKEN:g} bytes a token (a guess): {steps} steps"
    )
    return steps


def _strategy(made: Translation, train: Mapping[str, Any], nodes: int, per_node: int) -> None:
    asked = train.get("parallelismStrategy")
    if asked is None:
        return
    key = "trainingConfig.parallelismStrategy"
    name = re.sub(r"[ _-]+", "-", asked.strip().lower()).removesuffix("-parallelism")
    name = re.sub(r"^zero(?=[123]$)", "zero-", name)
    name = _OTHER_NAMES.get(name, name)
    if name not in _STRATEGIES:
        why = next((why for word, why in _NOT_HERE.items() if name.startswith(word)), None)
        made.wrong(
            key,
            f"`{key}` is {asked!r}, which is not "
            + ("known" if why is None else f"available: {why}"),
            f"choose one of {', '.join(_STRATEGIES)}",
        )
        return
    degrees = {_NODE: max(2, per_node), _NODES: nodes if nodes > 1 else 2}
    fixed = {field: degrees.get(str(value), value) for field, value in _STRATEGIES[name].items()}
    if fixed != _STRATEGIES[name]:
        named = " and ".join(f"{field} {value}" for field, value in fixed.items() if value != 1)
        made.note(
            f"{key} {asked} names no degrees: {named}; change one with --set, such as "
            "--set layout.tensor=4"
        )
    for field, value in fixed.items():
        made.set(f"layout.{field}", value)
