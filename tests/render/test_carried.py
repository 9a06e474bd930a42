"""No setting of a job file is lost on its way into an engine's files without a word."""

import importlib
import json
import struct
from dataclasses import replace
from functools import cache

import pytest
from tests.render.plans import job_of, planned

from paceline.errors import PacelineError
from paceline.job.job import JobSpec
from paceline.job.non_defaults import fields_of, is_section, settings_asked
from paceline.render import ENGINES, render_job
from paceline.render.carried import EVERYTHING, PLANNED, covers, left_out

FIXED = {"sharding": "none", "tensor": 1, "pipeline": 1, "context": 1, "recompute": "none"}
BASES = {
    "two-nodes": {"layout": FIXED},
    "one-node": {"cluster": {"nodes": 1}, "layout": FIXED},
    "vertex": {"layout": FIXED, "cloud": {"storage": "gs://mine/jobs"}},
    "macs": {
        "cluster": {"accelerator": "M3-Ultra", "nodes": 2, "per_node": 1, "network": "auto"},
        "layout": FIXED,
    },
}
SAME_PLANS = {"vertex": "two-nodes"}
"""Bases that differ in their place alone, of which a plan reads nothing."""

BASE_OF = dict.fromkeys(("kfp", "modal", "runpod", "lambda"), "one-node")
BASE_OF |= {"mlx": "macs", "vertex": "vertex"}

VALUES = {
    "engine_path": "/shared/Megatron-LM",
    "model.pretrained": "./tiny",
    "model.revision": "main",
    "model.tokenizer": "./tiny",
    "model.chat_template": "./chat.jinja",
    "cluster.rendezvous_port": 29876,
    "data.path": "/corpus/*.txt",
    "data.corpus": "python-stdlib",
    "data.held_out": 0.3,
    "data.sources": [{"path": "/corpus/*.jsonl"}],
    "data.kind": "chat",
    "data.labels": ["a", "b"],
    "data.pack": "windows",
    "data.too_long": "drop",
    "data.train_on": "all",
    "data.held_out_path": "/held-out/*.txt",
    "data.broken_rows": 0.3,
    "data.cache": "/prepared",
    "train.steps": 37,
    "train.epochs": 2,
    "train.tokens": "1M",
    "train.optimizer": "sgd",
    "train.betas": [0.87, 0.97],
    "train.eps": 1e-7,
    "train.learning_rate": 0.0123,
    "train.warmup_steps": 7,
    "train.schedule": "linear",
    "train.decay_steps": 7,
    "train.final_learning_rate": 0.37,
    "train.weight_decay": 0.037,
    "train.clip_norm": 0.37,
    "train.objective": {"kind": "next_token"},
    "train.adapter": {"kind": "lora"},
    "train.compile": True,
    "train.attention": "fused",
    "train.states": "bf16",
    "train.fp8_recipe": "tensorwise",
    "train.async_tensor": True,
    "train.token_dispatcher": "deepep",
    "train.async_expert": True,
    "train.optimizer_in_backward": True,
    "train.loss_chunk": 256,
    "train.router_loss": 0.01,
    "train.gradient_compression": "bf16",
    "train.powersgd_rank": 7,
    "train.powersgd_start": 7,
    "train.bucket": "37 MiB",
    "train.static_graph": True,
    "train.deterministic": True,
    "train.seed": 37,
    "train.max_refused_steps": 7,
    "checkpoint.every": 7,
    "checkpoint.keep_last": 7,
    "checkpoint.keep_every": 7,
    "checkpoint.keep_best": 7,
    "checkpoint.copy_to": "file:///mnt/copies",
    "checkpoint.copy_keep": 7,
    "checkpoint.compress": "always",
    "evaluate.every": 7,
    "evaluate.samples": 777,
    "evaluate.patience": 7,
    "evaluate.min_delta": 0.37,
    "evaluate.prompts": "prompts.txt",
    "evaluate.prompt_tokens": 7,
    "evaluate.tasks": ["task.yaml"],
    "evaluate.outputs_every": 7,
    "recovery.max_restarts": 7,
    "recovery.poison": "skip",
    "recovery.on_oom": "refit",
    "recovery.node_strikes": 7,
    "recovery.strike_window": "7m",
    "recovery.shrink": False,
    "recovery.batch": "shrink",
    "recovery.replace_timeout": "7m",
    "recovery.spares": 7,
    "recovery.grace": "7m",
    "recovery.state": "replica",
    "recovery.fingerprint_every": 7,
    "recovery.final_digest": False,
    "recovery.snapshot_every": 7,
    "recovery.snapshot_peers": False,
    "recovery.patience": "37s",
    "recovery.collective_timeout": "37s",
    "recovery.heartbeat": "37s",
    "recovery.lease": "37s",
    "recovery.evict_stragglers": True,
    "drill.faults": ["kill rank=0 step=5"],
    "drill.kill": ["rank=0@step=5"],
    "drill.digest_every": 7,
    "metrics.tensorboard": True,
    "metrics.sinks": ["tensorboard"],
    "metrics.every": 7,
    "metrics.wandb.project": "mine",
    "metrics.wandb.entity": "us",
    "metrics.wandb.mode": "offline",
    "metrics.mlflow.uri": "http://127.0.0.1:5000",
    "metrics.mlflow.experiment": "mine",
    "metrics.prometheus.port": 9999,
    "metrics.prometheus.host": "0.0.0.0",
    "metrics.otel.endpoint": "http://127.0.0.1:4318",
    "alerts.defaults": False,
    "alerts.without": ["slow"],
    "alerts.rules": [{"name": "high", "metric": "train/loss", "above": 9}],
    "alerts.to": [],
    "alerts.targets": {"ops": {"webhook": "env:HOOK"}},
    "ssh.hosts": ["host-a", "host-b"],
    "ssh.hostfile": "hosts.txt",
    "ssh.port": 2222,
    "ssh.identity": "/keys/mine",
    "ssh.config": "/keys/config",
    "ssh.python": "/opt/python3",
    "ssh.address": "10.0.0.9",
    "ssh.connect_timeout": "37s",
    "slurm.partition": "debug",
    "slurm.account": "team",
    "slurm.qos": "high",
    "slurm.constraint": "ib",
    "slurm.time": "7h",
    "slurm.memory": "7G",
    "slurm.gpus_per_node": 7,
    "slurm.gpu_type": "h100",
    "slurm.spare_nodes": 2,
    "slurm.cpus": 7,
    "slurm.exclusive": False,
    "slurm.requeue": False,
    "slurm.max_requeues": 7,
    "slurm.array": "0-3",
    "slurm.setup": ["module load cuda"],
    "slurm.options": ["--reservation=mine"],
    "slurm.python": "/opt/python3",
    "cloud.region": "us-east4",
    "cloud.image": "registry/image:1",
    "cloud.idle_stop": "37m",
    "cloud.max_run": "37m",
    "cloud.storage": "gs://other/place",
    "cloud.secrets": ["HF_TOKEN"],
    "cloud.setup": ["pip install mine"],
    "ray.address": "10.0.0.5:6379",
    "ray.python": "/opt/python3",
    "kubernetes.image": "registry/image:1",
    "kubernetes.script": "/app/train.py",
    "kubernetes.namespace": "team",
    "kubernetes.api": "pytorchjob",
    "kubernetes.runtime": "torch-distributed",
    "kubernetes.accelerator_resource": "example.com/gpu",
    "kubernetes.node_selector": {"kind": "fast"},
    "kubernetes.tolerations": ["reserved"],
    "kubernetes.service_account": "trainer",
    "kubernetes.rdma_resource": "rdma/hca",
    "kubernetes.rdma_devices": 7,
    "kubernetes.network": "team/sriov",
    "kubernetes.shm": "7 GiB",
    "kubernetes.claim": "checkpoints",
    "kubernetes.secrets": {"HF_TOKEN": "hf/token"},
    "kubernetes.queue": "team-a",
    "kubernetes.max_run": "7h",
    "program": "mine:train",
}
"""Every setting that is not part of the plan, at another value than its default and the base's."""

TOKENS = {"model.tokenizer": "./tiny"}
DRAWN = TOKENS | {"model.decoder": None, "model.pretrained": "./p", "model.weights": "drawn"}
OF_SINKS = (
    *("wandb.project", "wandb.entity", "wandb.mode", "mlflow.uri", "mlflow.experiment"),
    *("prometheus.port", "prometheus.host", "otel.endpoint"),
)
TOGETHER = {
    "recovery.batch": {"recovery.shrink": True},
    "model.revision": DRAWN,
    "model.chat_template": DRAWN,
    "data.kind": TOKENS,
    **{
        f"kubernetes.{of}": {"kubernetes.rdma_resource": "rdma/hca"}
        for of in ("rdma_devices", "shm")
    },
    "ssh.port": {"ssh.hosts": ["host-a", "host-b"]},
    "data.corpus": {"data.corpus": None, "data.path": "/corpus/*.txt"},
    "evaluate.min_delta": {"evaluate.patience": 7},
    "evaluate.prompt_tokens": {"evaluate.prompts": "prompts.txt"},
    **{f"metrics.{of}": {"metrics.sinks": [of.partition(".")[0]]} for of in OF_SINKS},
    "evaluate.outputs_every": {"evaluate.prompts": "prompts.txt"},
    "train.decay_steps": {"train.schedule": "wsd"},
    "train.powersgd_rank": {"train.gradient_compression": "powersgd"},
    "train.powersgd_start": {"train.gradient_compression": "powersgd"},
}
"""What is in the job with and without a setting, which means nothing else."""

INSTEAD = {
    "model.pretrained": {"model.decoder": None},
    **{key: {"data.corpus": None} for key in ("data.path", "data.sources")},
    "data.corpus": {"data.path": None},
    **{key: {"train.steps": None} for key in ("train.epochs", "train.tokens")},
}
"""What a setting takes the place of."""

PLACES = {"ssh", "slurm", "cloud", "ray", "kubernetes"}
"""Sections that say where and how a plan is started, and of which it reads nothing but whether
pods have an RDMA device: without one a job for Kubernetes is planned over TCP."""

ON_DISK = {
    "model.pretrained",
    "model.revision",
    "model.tokenizer",
    "model.chat_template",
    "data.kind",
}
"""Settings whose plan is of files, which are not here: the plan is that of the same sizes."""

NEVER_DONE = {"recovery.shrink", "recovery.snapshot_peers", "train.objective"}
"""Set to what files without them do anyway."""

OF_PLACE = {"kubernetes": ["kubernetes.api"], "ray": ["kubernetes.api"]}
"""Which of the files `paceline run --on` submits: all kinds of objects are written."""


def keys(kind=JobSpec, before=""):
    for name, field in fields_of(kind).items():
        if is_section(field):
            yield from keys(field.annotation, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def changed(base, key):
    """The base's sections with a setting changed."""
    return with_settings(base, {**TOGETHER.get(key, {}), **INSTEAD.get(key, {}), key: VALUES[key]})


def with_settings(base, settings):
    changes = {name: dict(section) for name, section in BASES[base].items()}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = changes
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return changes


@cache
def plan_with(base, key):
    if base in SAME_PLANS:
        return plan_with(SAME_PLANS[base], key)[0], job_of(**changed(base, key))
    if key in ON_DISK or key.partition(".")[0] in PLACES or is_beside_the_plan(key):
        return plain(base, key)[0], job_of(**changed(base, key))
    return planned(**changed(base, key))


@cache
def is_beside_the_plan(key):
    """Whether two nodes are planned the same with and without it: its plans on fewer nodes and on
    Macs are then those without it, in which nothing of it can be."""
    try:
        plan, _ = planned(**changed("two-nodes", key))
    except PacelineError:
        return False
    without, _ = plain("two-nodes", key)
    return replace(plan, search_s=without.search_s) == without


def plain(base, key):
    return plain_with(base, key if key in TOGETHER else None)


@cache
def plain_with(base, key):
    settings = with_settings(base, TOGETHER.get(key, {}))
    if base in SAME_PLANS:
        return plain(SAME_PLANS[base], key)[0], job_of(**settings)
    if key in ON_DISK:
        return plain(base, None)[0], job_of(**settings)
    return planned(**settings)


@cache
def plain_files(engine, base, key):
    return render_job(engine, *plain_with(base, key)).files


def test_every_setting_has_a_value_here_or_is_part_of_the_plan():
    settings = [key for key in keys() if not covers(PLANNED, key)]
    assert [key for key in settings if key not in VALUES] == []
    assert [key for key in VALUES if key not in settings] == []


@pytest.mark.parametrize(
    "key", ["ssh.hosts", "slurm.spare_nodes", "cloud.max_run", "ray.address", "kubernetes.shm"]
)
def test_a_plan_reads_nothing_of_the_place_it_is_started_at(key):
    plan, _ = planned(**changed("two-nodes", key))
    without, _ = plain("two-nodes", None)
    assert replace(plan, search_s=without.search_s) == without


def test_what_a_job_leaves_out_is_not_asked_for():
    _, job = plain("two-nodes", "train.bucket")
    asked = settings_asked(job.spec)
    assert asked["train.steps"] == 100
    assert asked["data.corpus"] == "python-stdlib"
    assert "train.bucket" not in asked
    _, job = plan_with("two-nodes", "train.adapter")
    assert "train.adapter" in settings_asked(job.spec)


def gaps_of(engine, plan, job):
    """What `render_job` has in its gaps, without the files."""
    module = importlib.import_module(ENGINES[engine].module)
    own = list(module.gaps(plan, job))
    return [*own, *left_out(job, module.CARRIES, {gap.where for gap in own})]


def is_gap(key, gaps):
    section, _, name = key.partition(".")
    return any(gap.where == key or (gap.where == section and name in gap.what) for gap in gaps)


def silent(engine):
    """Settings that change nothing in an engine's files and of which no gap says a word."""
    base = BASE_OF.get(engine, "two-nodes")
    for key in VALUES:
        if key in NEVER_DONE or key in OF_PLACE.get(engine, ()):
            continue
        try:
            plan, job = plan_with(base, key)
            if is_gap(key, gaps_of(engine, plan, job)):
                continue
            found = render_job(engine, plan, job)
        except PacelineError as error:  # refused, with the key as the place, or what it needs
            places = (key, *TOGETHER.get(key, {}))
            if any(problem.where.startswith(places) for problem in error.problems):
                continue
            raise
        if found.files == plain_files(engine, base, key if key in TOGETHER else None):
            yield key


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "network"])
def test_every_setting_reaches_the_files_or_is_a_gap(engine):
    assert list(silent(engine)) == []


def test_the_network_starts_no_training_and_so_loses_nothing_of_it():
    module = importlib.import_module(ENGINES["network"].module)
    assert module.CARRIES == EVERYTHING
    assert "train.json" not in render_job("network", *plain("two-nodes", "train.bucket")).files


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_says_that_it_carries_is_there(engine):
    module = importlib.import_module(ENGINES[engine].module)
    known = {*keys(), *(key.partition(".")[0] for key in keys()), ""}
    assert set(module.CARRIES) <= known


WEIGHTS = ("model.pretrained", {"model": {"decoder": None, "pretrained": "TINY"}})
ELSE = [
    WEIGHTS,
    ("data.kind", {"data": {"kind": "chat"}, "model": {"tokenizer": "./tiny"}}),
    ("data.sources", {"data": {"corpus": None, "sources": [{"path": "a.jsonl"}]}}),
]
"""Settings without which an engine's files would train something else."""

PODS = {"ray", "kubernetes", "kfp"}
OWN_LOOP = {"megatron", "megatron-bridge", "torchtitan"}
REFUSED_BY = {
    "model.pretrained": OWN_LOOP,
    "data.kind": PODS | OWN_LOOP,
    "data.sources": PODS,
}
"""Where no program of one's own takes the example's place; the others name it in a gap."""


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "network"])
@pytest.mark.parametrize(("key", "changes"), ELSE, ids=[key for key, _ in ELSE])
def test_no_file_trains_something_else_than_the_weights_and_rows_of_the_job(
    engine, key, changes, tmp_path
):
    base = BASE_OF.get(engine, "two-nodes")
    plan, job = plain(base, "")[0], job_of(**BASES[base], **with_weights(changes, tmp_path))
    if engine in REFUSED_BY[key]:
        with pytest.raises(PacelineError) as refused:
            render_job(engine, plan, job)
        assert any(problem.where.startswith(key) for problem in refused.value.problems)
        return
    found = render_job(engine, plan, job)
    if key == "model.pretrained" and engine not in ("mlx", "tensorflow"):  # transformers loads them
        program = next(text for text in found.files.values() if '"pretrained"' in text)
        assert str(tmp_path) in program
        apart = engine in PODS | {"sky", "modal", "runpod", "lambda", "vertex"}
        gaps = [gap.nearest for gap in found.gaps if gap.where == key]
        assert apart == ("train.py ends where it is missing" in str(gaps))
        return
    said = next(gap for gap in found.gaps if gap.where == key or key in gap.what)
    if "train.json" in found.files:
        assert "TRAIN_SCRIPT" in said.nearest
        assert any(what in said.what for what in json.loads(found.files["train.json"])["needs"])
    else:  # Megatron and torchtitan read no data of the job at all, and say so
        assert key == "data.sources"


def with_weights(changes, folder):
    """The changes with a folder of a model in place of TINY."""
    if changes.get("model", {}).get("pretrained") != "TINY":
        return changes
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    model = changes["model"] | {"pretrained": str(folder), "tokenizer": "bytes"}
    return changes | {"model": model}


def test_the_image_may_have_a_program_of_its_own_for_rows(tmp_path):
    base = BASES["two-nodes"]
    changes = {"kubernetes": {"script": "/app/train.py"}} | dict(ELSE)["data.kind"]
    gaps = render_job("kubernetes", planned(**base)[0], job_of(**base, **changes)).gaps
    (said,) = (gap.nearest for gap in gaps if gap.where == "data.kind")
    assert said == "what /app/train.py does"


def test_sizes_alone_are_rendered_where_the_job_asks_for_drawn_weights(tmp_path):
    changes = {"model": WEIGHTS[1]["model"] | {"weights": "drawn"}}
    job = job_of(**with_weights(changes, tmp_path))
    drawn = render_job("torchrun", planned(**BASES["two-nodes"])[0], job)
    program = json.loads(drawn.files["train.json"])
    assert (program["needs"], program["pretrained"]) == ([], None)
    assert program["model"]["intermediate_size"] == 64


@pytest.mark.parametrize("engine", ["torchrun", "accelerate", "mlx", "tensorflow"])
def test_a_program_of_ones_own_is_named_and_not_its_model(engine):
    found = render_job(engine, *plan_with(BASE_OF.get(engine, "two-nodes"), "program"))
    said = [gap.what for gap in found.gaps if gap.where in ("program", "model")]
    assert said == ["your program mine:train"]


def test_a_program_of_ones_own_is_refused_where_nothing_else_can_be_put_in_its_place():
    with pytest.raises(PacelineError, match="your program mine:train") as refused:
        render_job("kubernetes", *plan_with("two-nodes", "program"))
    assert refused.value.problems[0].where.startswith("program, job.yaml")


def test_gaps_show_settings_as_a_job_file_has_them_and_no_defaults():
    train = {"adapter": {"kind": "dora", "targets": ["query"]}, "objective": {"kind": "auto"}}
    sources = {"sources": [{"path": "a.jsonl", "weight": 2}], "corpus": None, "broken_rows": 0.5}
    job = job_of(**{**BASES["two-nodes"], "train": train, "data": sources})
    found = {gap.where: gap.what for gap in left_out(job, {"cluster"}, {"data.sources"})}
    assert found["train.adapter"] == "train.adapter: {kind: dora, targets: [query]}"
    assert found["data.broken_rows"] == "data.broken_rows: 0.5"
    assert "train.objective" not in found
    assert not any("Spec(" in what or "'" in what for what in found.values())
