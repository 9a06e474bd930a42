"""A plan that `paceline run` refuses from the job file and the files that it names is not made."""

import json
import struct
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.prepare.conftest import CHATML, a_chat, make_tokenizer, write_rows

from paceline.cli import plan, prove, render, run
from paceline.cli.run_job import find_data_there
from paceline.errors import JobError, PacelineError, Problem
from paceline.job import parse_job
from paceline.launch import engine_run
from paceline.launch.plannable import check_plannable, check_reduction
from paceline.launch.ready import check_can_run
from paceline.plan import plan_job
from paceline.render import render_job, renderer_of

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
CHAT = {"path": "chats.jsonl", "kind": "chat", "seq_len": 64, "too_long": "cut"}
PRETRAINED = {"model": {"pretrained": "tiny"}, "data": CHAT}
ELSEWHERE = {"accelerator": "H100-SXM", "nodes": 2}


@pytest.fixture
def folder(tmp_path):
    """A model with weights and a tokenizer, conversations, and texts with labels."""
    make_tokenizer(tmp_path / "tiny")
    (tmp_path / "tiny/config.json").write_text(json.dumps(LLAMA))
    write_weights(tmp_path / "tiny/model.safetensors")
    write_rows(tmp_path / "chats.jsonl", [a_chat()] * 8)
    write_rows(tmp_path / "many.jsonl", [a_chat()] * 80)
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8)
    write_rows(tmp_path / "labels.jsonl", [{"text": "fine", "label": each} for each in "abab"])
    (tmp_path / "prompts.txt").write_text("Once upon a time\n")
    return tmp_path


def write_weights(path: Path) -> None:
    """A safetensors file with the names and shapes of LLAMA's tensors, and zeros."""
    head, ffn, kv = LLAMA["hidden_size"], LLAMA["intermediate_size"], 16
    shapes = {"model.embed_tokens": (512, head), "model.norm": (head,), "lm_head": (512, head)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.{name}_layernorm": (head,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (head, head) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (kv, head) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (ffn, head) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (head, ffn)}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        header[f"{name}.weight"] = entry
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def job_of(folder: Path, **changes):
    return parse_job(text_of(**changes), source="job.yaml", folder=folder)


def text_of(**changes) -> str:
    """PRETRAINED, in two steps on this machine, with changes by dotted name."""
    job = {
        **{name: dict(section) for name, section in PRETRAINED.items()},
        "cluster": {"accelerator": "cpu", "per_node": 1},
        "train": {"global_batch": 2, "steps": 2},
    }
    for name, value in changes.items():
        section, _, field = name.partition(".")
        if field:
            job.setdefault(section, {})[field] = value
        else:
            job[section] = value
    return yaml.safe_dump(job)


def refused(job) -> tuple[Problem, ...]:
    try:
        check_plannable(job)
    except JobError as error:
        return tuple(error.problems)
    return ()


def refused_by_run(job) -> list[Problem]:
    try:
        find_data_there(job, "local", prepare=False)
        return list(check_can_run(job, plan_job(job)))
    except JobError as error:
        return list(error.problems)


def test_what_run_trains_is_planned(folder):
    for changes in (
        {},
        {"data.kind": "auto"},
        {"train.adapter": {"kind": "dora"}},
        {"evaluate": {"prompts": "prompts.txt"}},
        {"data": {"path": "pairs.jsonl", "kind": "preference", "seq_len": 64}},
    ):
        job = job_of(folder, **changes)
        assert check_plannable(job) == []
        assert refused_by_run(job) == []


CLASSES = {"path": "labels.jsonl", "kind": "classification", "seq_len": 64}
PAIRS = {"path": "pairs.jsonl", "kind": "preference", "seq_len": 64}
DECODER = {"layers": 1, "hidden": 8, "heads": 1}
REFUSED = {
    "more positions than the model has": ({"data.seq_len": 256}, "M014", "data.seq_len"),
    "dora with dropout": (
        {"train.adapter": {"kind": "dora", "dropout": 0.1}},
        "R013",
        "train.adapter.kind",
    ),
    "compiled chats": ({"train.compile": True}, "R013", "train.compile"),
    "compiled rows that are chats": (
        {"train.compile": True, "data.kind": "auto"},
        "R013",
        "train.compile",
    ),
    "compiled pairs": ({"train.compile": True, "data": PAIRS}, "R013", "train.compile"),
    "no adapter to start from": (
        {"train.adapter": {"kind": "lora", "start": "nowhere"}},
        "M012",
        "train.adapter.start",
    ),
    "no prompts": ({"evaluate": {"prompts": "nofile.txt"}}, "J014", "evaluate.prompts"),
    "no tasks": ({"evaluate": {"tasks": ["nofile.yaml"]}}, "J014", "evaluate.tasks"),
    "no tokenizer": ({"model.tokenizer": "nowhere"}, "D010", "model.tokenizer"),
    "no data": ({"data.path": "nothing/*.jsonl"}, "D001", "data.path"),
    "no held-out data": ({"data.held_out_path": "nothing"}, "D001", "data.held_out_path"),
    "rows of another kind": ({"data.path": "labels.jsonl"}, "D016", "data.path"),
    "labels that no row has": (
        {"data": {**CLASSES, "labels": ["neg", "pos"]}},
        "D013",
        "data.path",
    ),
    "weights that would not be used": (
        {"model": {"hf_config": "tiny"}, "data": {"corpus": "python-stdlib"}},
        "M016",
        "model.hf_config",
    ),
    "rows as bytes": (
        {"model": {"decoder": DECODER}, "data": {"path": "chats.jsonl"}},
        "D006",
        "data.path",
    ),
    "evaluations of nothing": (
        {"data.held_out": 0, "evaluate": {"every": 1}},
        "J007",
        "evaluate.every",
    ),
    "samples of nothing": (
        {"data.held_out": 0, "evaluate": {"samples": 2}},
        "J007",
        "evaluate.samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_run_refuses_is_not_planned(folder, name):
    changes, code, field = REFUSED[name]
    job = job_of(folder, **changes)
    (problem,) = refused(job)
    assert (problem.code, problem.where.partition(", ")[0].partition(" (")[0]) in (
        (code, field),
        (code, str(folder / "nofile.txt")),
        (code, str(folder / "nofile.yaml")),
    )
    assert problem in refused_by_run(job)


@pytest.mark.parametrize(("cluster", "place"), [(ELSEWHERE, "slurm"), ({}, "local")])
def test_a_plan_needs_no_data_and_a_run_does(folder, cluster, place):
    """For this machine's GPUs, J007 was all that a job without data got."""
    changes = {"model": {"decoder": DECODER}, "data": {"seq_len": 64}}
    job = job_of(folder, **changes, cluster=cluster)
    assert check_plannable(job) == []
    assert "J007" in [each.code for each in check_can_run(job, plan_job(job), place=place)]


def test_files_of_the_model_are_looked_at(folder):
    config = LLAMA | {"vocab_size": 300}
    (folder / "tiny/config.json").write_text(json.dumps(config))
    assert {each.code for each in refused(job_of(folder))} == {"D011", "M013"}
    (folder / "tiny/config.json").write_text(json.dumps(LLAMA))
    weights = folder / "tiny/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (problem,) = refused(job_of(folder))
    assert (problem.code, "cut off" in problem.what) == ("M012", True)


def test_a_missing_adapter_is_told_without_the_words_of_python(folder):
    job = job_of(folder, **{"train.adapter": {"start": "nowhere"}})
    (problem,) = refused(job)
    assert problem.what.endswith(
        "is no adapter of peft: there is no adapter_model.safetensors and no adapter_config.json"
    )
    (folder / "nowhere").mkdir()
    (folder / "nowhere/adapter_model.safetensors").touch()
    (folder / "nowhere/adapter_config.json").write_text("[1")
    assert refused(job)[0].what.endswith("adapter_config.json is not a JSON table")


def test_windows_are_only_proposed_for_texts(folder):
    write_rows(folder / "texts.jsonl", [{"text": "a b c"}] * 8)
    texts = {"path": "texts.jsonl", "pack": "documents", "seq_len": 64}
    for data, is_proposed in ((PAIRS, False), (CHAT, False), (texts, True)):
        (problem,) = refused(job_of(folder, **{"data": data, "train.compile": True}))
        assert ("windows" in problem.fix) is is_proposed


@pytest.mark.parametrize(
    "template", ["{% for message in messages %}", "{{ raise_exception('system only') }}"]
)
def test_a_template_that_fails_is_named_and_not_its_rows(folder, template):
    (folder / "tiny/chat_template.jinja").write_text(template)
    for path in ("chats.jsonl", "many.jsonl"):
        (problem,) = refused(job_of(folder, **{"data.path": path}))
        assert (problem.code, problem.where.partition(",")[0]) == ("D012", "model.chat_template")
        assert str(folder / "tiny/chat_template.jinja") in problem.what
        assert "rows are broken" not in problem.what


def test_rows_that_a_template_cannot_mask_are_refused(folder):
    forgets = CHATML.replace("messages %}", "messages[-1:] %}", 1)
    (folder / "tiny/chat_template.jinja").write_text(forgets)
    (problem,) = refused(job_of(folder))
    assert problem.code == "D014"


def test_first_rows_that_look_broken_are_named_where_there_are_more(folder):
    rows = [{"messages": [{"role": "usr", "content": "a"}]}] * 70
    write_rows(folder / "odd.jsonl", [*rows, a_chat()])
    (problem,) = check_plannable(job_of(folder, **{"data.path": "odd.jsonl"}))
    assert problem.what.startswith("none of the first 64 rows of odd can be trained on")
    assert "role 'usr'" in problem.what


def test_data_may_be_on_the_cluster_that_a_job_declares(folder):
    changes = {"data.path": "/far/*.jsonl", "model.tokenizer": "/far/tokenizer"}
    for path, code in (("data.path", "D001"), ("model.tokenizer", "D010")):
        there = job_of(folder, **{path: changes[path], "cluster": ELSEWHERE})
        (problem,) = check_plannable(there)
        assert problem.code == code
        assert [each.code for each in refused(job_of(folder, **{path: changes[path]}))] == [code]


def test_models_of_other_engines_are_planned_and_named(folder):
    bert = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 512}
    bert |= {"num_hidden_layers": 2, "intermediate_size": 64}
    (folder / "bert.json").write_text(json.dumps(bert))
    data = {"corpus": "python-stdlib", "seq_len": 64}
    job = job_of(folder, model={"hf_config": "bert.json"}, data=data)
    (problem,) = check_plannable(job)
    assert (problem.code, problem.where) == ("R013", "model.hf_config, job.yaml line 8")
    assert check_plannable(job_of(folder, **{"engine": "megatron", "data.path": "/far/x"})) == []


def test_packages_are_no_matter_of_a_plan(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert check_plannable(job_of(folder)) == []


@pytest.mark.parametrize("verb", [plan, prove, render])
def test_every_verb_that_plans_refuses_what_run_refuses(folder, verb):
    (folder / "job.yaml").write_text(text_of(**{"data.seq_len": 256}))
    more = ["--for", "torchrun"] if verb is render else []
    done = CliRunner().invoke(verb.command, [str(folder / "job.yaml"), *more])
    assert isinstance(done.exception, JobError)
    assert done.exception.problems[0].code == "M014"


def test_what_is_named_goes_to_standard_error(folder):
    text = text_of(**{"data.path": "/far/*.jsonl", "cluster": ELSEWHERE})
    (folder / "job.yaml").write_text(text)
    done = CliRunner().invoke(plan.command, [str(folder / "job.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("note: D001: data.path '/far/*.jsonl' matches no file")
    assert json.loads(done.stdout)["engine"] == "paceline"


OTHER = {
    "model": {"preset": "llama-3-8b"},
    "data": {"path": "/shared/corpus", "seq_len": 1024},
    "cluster": ELSEWHERE,
    "train": {"global_batch": 64, "steps": 2},
}


MADE_UP = {"path": None, "corpus": "mock", "seq_len": 1024}


def said_of(folder: Path, **changes) -> dict[str, list[str]]:
    """Verb -> what it prints as notes, or refuses, of a job for another engine."""
    job = {name: section | changes.pop(name, {}) for name, section in OTHER.items()} | changes
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    name = str(folder / "job.yaml")
    engine = renderer_of(job["engine"]) or "torchrun"
    verbs = {
        "plan": (plan, []),
        "render": (render, ["--for", engine]),
        "run": (run, ["--on", "slurm", "--dry-run", "--out", str(folder / "out")]),
    }
    found = {}
    for verb, (module, words) in verbs.items():
        done = CliRunner().invoke(module.command, [name, *words])
        if isinstance(done.exception, PacelineError):
            found[f"{verb} refuses"] = list(map(str, done.exception.problems))
            continue
        assert done.exit_code == 0, done.output
        notes = done.stderr.split("note: ")[1:]
        parts = [note.splitlines() for note in notes]
        choices = [[line for line in lines[3:] if line.startswith("       or ")] for lines in parts]
        found[verb] = [
            "\n".join(lines[:3] + more) for lines, more in zip(parts, choices, strict=True)
        ]
    return found


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        ({"engine": "accelerate", "layout": {"tensor": 2}}, "H002", "tensor 2"),
        ({"engine": "fsdp1", "train": {"optimizer": "muon"}}, "H002", "the optimizer muon"),
        ({"engine": "deepspeed", "data": {"kind": "chat"}}, "H002", "data.kind chat"),
        ({"engine": "megatron"}, "H025", "a checkout of Megatron-LM"),
        ({"engine": "torchtitan"}, "H025", "a tokenizer"),
        ({"engine": "torchtitan", "data": MADE_UP}, "H025", "torchtitan needs data"),
    ],
)
def test_plan_and_render_print_what_run_refuses_of_another_engine(tmp_path, changes, code, what):
    if "data" in changes:
        changes = {**changes, "model": {"tokenizer": "/shared/llama-3"}}
    found = said_of(tmp_path, **changes)
    refused = found.pop("run refuses")
    assert any(each.startswith(f"{code}: ") and what in each for each in refused)
    assert "plan" in found
    assert found == dict.fromkeys(found, refused)


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed", "torchtitan", "paceline"])
def test_a_field_that_an_engine_does_not_read_is_planned_with_a_note_and_not_run(tmp_path, engine):
    """The whole plan was printed, and then J007 with exit code 2."""
    given = {"model": {"tokenizer": "/shared/llama-3"}} if engine == "torchtitan" else {}
    found = said_of(tmp_path, engine=engine, engine_path="/shared/Megatron-LM", **given)
    (refused,) = found["run refuses"]
    assert refused.startswith("J007: engine_path is read for the engine megatron alone")
    assert refused in found["plan"]


@pytest.mark.parametrize("accelerator", ["TPU-v5p", "Trainium2", "Gaudi3"])
def test_what_our_own_runtime_does_not_train_on_is_planned_with_a_warning_and_not_run(
    tmp_path, accelerator
):
    cluster = {**ELSEWHERE, "accelerator": accelerator}
    found = said_of(tmp_path, engine="paceline", cluster=cluster)
    (refused,) = found["run refuses"]
    assert refused.startswith(f"R015: Paceline's own runtime does not train on {accelerator}")
    (caution,) = (
        each
        for each in plan_job(job_of(tmp_path, **{**OTHER, "cluster": cluster})).cautions
        if each.about == "accelerator"
    )
    assert caution.what in refused
    assert caution.fix.startswith(
        f"no engine that Paceline writes files for trains on {accelerator}: bring your own "
        "script: TRAIN_SCRIPT"
    )
    assert ("maxtext is estimated there" in caution.fix) is accelerator.startswith("TPU")
    named = job_of(tmp_path, **{**OTHER, "cluster": cluster, "engine": "maxtext"})
    abouts = [each.about for each in plan_job(named).cautions]
    assert ("accelerator" in abouts) is not accelerator.startswith("TPU")


def test_fsdp1_is_planned_rendered_and_run_by_accelerate(tmp_path):
    found = said_of(tmp_path, engine="fsdp1", layout={"sharding": "full"})
    assert found == {"plan": [], "render": [], "run": []}


@pytest.mark.parametrize(
    ("engine", "installed", "refused", "noted"),
    [
        ("deepspeed", "0.18.3", "", ""),
        ("deepspeed", "0.10.0", "deepspeed 0.10.0 is installed, and the files are for 0.16.0", ""),
        ("deepspeed 0.16.0", "0.19.8", "is installed, and the plan is for 0.16.0", ""),
        ("deepspeed 0.19.1", "0.19.8", "", ""),
        ("deepspeed", "0.21.0", "", "deepspeed 0.21.0 is installed, and the files are for"),
        ("fsdp1", "1.2.0", "accelerate 1.2.0 is installed, and the files are for 1.10.0", ""),
    ],
)
def test_the_release_that_is_installed_is_one_that_the_files_are_for(
    monkeypatch, tmp_path, engine, installed, refused, noted
):
    monkeypatch.setattr(engine_run, "version", lambda package: installed)
    monkeypatch.setattr(engine_run, "_is_installed", lambda module: True)
    job = job_of(tmp_path, **{**OTHER, "engine": engine})
    plan = plan_job(job)
    found = list(engine_run.check(plan.engine, job, plan, place="local"))
    said = [f"{each.what} {each.fix}" for each in found if each.code == "H023"]
    assert [refused in each for each in said] == [True] * bool(refused)
    notes = engine_run.prepare(plan.engine, job, plan, place="local").notes
    assert any(noted in each for each in notes if each.startswith("note: ")) == bool(noted)


SHARDED = {
    "model": {"decoder": {"layers": 2, "hidden": 64, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 64},
    "cluster": {"accelerator": "H100-SXM", "nodes": 1, "per_node": 8},
    "layout": {"sharding": "full"},
}


@pytest.mark.parametrize(
    ("field", "value"),
    [("bucket", "25MiB"), ("static_graph", True), ("gradient_compression", "bf16")],
)
def test_what_only_an_all_reduce_uses_is_refused_where_there_is_none(tmp_path, field, value):
    train = {"global_batch": 16, "steps": 5, field: value}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(SHARDED | {"train": train}))
    refused = CliRunner().invoke(plan.command, [str(file)]).exception
    assert isinstance(refused, JobError)
    (problem,) = refused.problems
    assert (problem.code, problem.where.split(",")[0]) == ("L024", f"train.{field}")
    whole = SHARDED | {"train": train, "layout": {"sharding": "none", "micro_batch": 2}}
    file.write_text(yaml.safe_dump(whole))
    assert CliRunner().invoke(plan.command, [str(file)]).exit_code == 0


@pytest.mark.parametrize(
    "given",
    [{"bucket": "25MiB"}, {"gradient_compression": "bf16"}, {"gradient_compression": "powersgd"}],
    ids=str,
)
def test_an_open_layout_is_one_that_uses_what_the_job_sets_of_the_all_reduce(tmp_path, given):
    """The fastest was planned, sharded, and then refused."""
    cluster = {**ELSEWHERE, "accelerator": "H100-SXM"}
    model = {"preset": "llama-3.2-1b"}
    train = {"global_batch": 64, "steps": 5}
    data = {"seq_len": 4096}
    plain = plan_job(job_of(tmp_path, cluster=cluster, model=model, train=train, data=data))
    assert plain.layout.keeps_shards
    job = job_of(tmp_path, cluster=cluster, model=model, train=train | given, data=data)
    made = plan_job(job)
    assert made.layout.sharding == "none"
    assert list(check_reduction(job, made)) == []
    (reason,) = (each.reason for each in made.decisions if each.field == "layout.sharding")
    assert reason.startswith(f"train.{next(iter(given))} is of the all-reduce")


def test_where_no_layout_with_an_all_reduce_fits_the_refusal_says_so(tmp_path):
    cluster = {**ELSEWHERE, "accelerator": "L4", "nodes": 4, "per_node": 8}
    train = {"global_batch": 32, "steps": 5, "bucket": "25MiB"}
    layout = {"tensor": 1, "pipeline": 1}
    model = {"preset": "llama-3.2-3b"}
    job = job_of(
        tmp_path, cluster=cluster, model=model, train=train, layout=layout, data={"seq_len": 4096}
    )
    (problem,) = check_reduction(job, plan_job(job))
    assert problem.what.endswith("; no layout with an all-reduce fits in memory")
    assert problem.fix == "leave train.bucket out"


@pytest.mark.parametrize("to", ["accelerate", "torchrun", "deepspeed"])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_files_carry_a_bucket_where_ddp_reads_it_and_list_it_elsewhere(to, sharding):
    asked = SHARDED | {
        "train": {"global_batch": 16, "steps": 5, "bucket": "25MiB"},
        "layout": {"sharding": sharding},
        "engine": {"torchrun": "fsdp1"}.get(to, to),
    }
    job = parse_job(yaml.safe_dump(asked), source="job.yaml", folder=Path.cwd())
    found = render_job(to, plan_job(job), job)
    is_read = sharding == "none" and to != "deepspeed"
    assert ("train.bucket" in {gap.where for gap in found.gaps}) is not is_read
    read = json.loads(found.files["train.json"])["bucket_bytes"]
    assert read == (None if sharding == "full" else 25 * 2**20)
