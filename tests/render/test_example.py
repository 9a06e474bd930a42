"""The example program's data."""

import importlib.util
import json
import re
import struct
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.render.plans import job_of, planned, rendered
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from paceline import render
from paceline.errors import JobError
from paceline.render import RenderError, render_job
from paceline.render.example import settings


def program(folder: Path, paths: Any) -> ModuleType:
    """`lm_plain.py` in a folder."""
    source = Path(render.__file__).parent / "scripts" / "lm_plain.py"
    (folder / "lm_plain.py").write_text(source.read_text())
    (folder / "train.json").write_text(json.dumps({"model": None, "data": {"paths": paths}}))
    spec = importlib.util.spec_from_file_location("lm_plain", folder / "lm_plain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(folder: Path, paths: Any) -> bytes:
    asked = {"data": DATA | {"paths": paths, "seq_len": 2}, "batch": {}, "vocab": 256}
    return b"".join(program(folder, paths).Text(asked).parts)


DATA: dict[str, Any] = {"corpus": None, "kind": "auto", "tokenizer": None}


@pytest.mark.parametrize("kind", ["nanogpt", "llm.c", "megatron"])
def test_token_files_are_read_as_the_planned_tokens_across_files(tmp_path, kind):
    paths, numbers = [], iter(range(70_000 if kind == "megatron" else 0, 10**6))
    for name in ("a", "b"):
        tokens = array("i" if kind == "megatron" else "H", [next(numbers) for _ in range(7)])
        head = struct.pack("<i", 20240520).ljust(1024, b"\0") if kind == "llm.c" else b""
        (tmp_path / f"{name}.bin").write_bytes(head + tokens.tobytes())
        paths.append(str(tmp_path / f"{name}.bin"))
        if kind == "megatron":
            index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<i", 7)
            (tmp_path / f"{name}.idx").write_bytes(index)
    asked = {"data": DATA | {"paths": paths, "seq_len": 4}, "batch": {}, "vocab": 70_014}
    text = program(tmp_path, paths).Text(asked)
    first = 70_000 if kind == "megatron" else 0
    assert text.take([0, 1, 2]) == [list(range(first + 4 * n, first + 4 * n + 5)) for n in range(3)]
    small = program(tmp_path, paths).Text(asked | {"vocab": first + 9})
    with pytest.raises(SystemExit, match=f"token {first + 12} in the data: the model knows"):
        small.take([2])


def test_text_becomes_tokens_of_the_jobs_tokenizer(tmp_path):
    (tmp_path / "tok").mkdir()
    tokenizer = Tokenizer(WordLevel({"one": 7, "two": 9, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("one two one two one")
    job = job_of(
        **ONE_NODE,
        model={"tokenizer": str(tmp_path / "tok")},
        data={"corpus": None, "path": str(tmp_path / "a.txt")},
    )
    asked = settings(planned(**ONE_NODE)[0], job)
    asked["data"]["seq_len"] = 2
    assert program(tmp_path, None).Text(asked).take([0, 1]) == [[7, 9, 7], [7, 9, 7]]
    (tmp_path / "a.jsonl").write_text("{}")
    asked["data"]["paths"] = [str(tmp_path / "a.jsonl")]
    with pytest.raises(SystemExit, match="holds rows, or is compressed"):
        program(tmp_path, None).Text(asked)


@pytest.mark.parametrize(
    ("to", "engine"),
    [("deepspeed", "deepspeed"), ("accelerate", "accelerate"), ("torchrun", "fsdp1")],
)
def test_paths_that_only_the_nodes_have_are_looked_for_on_the_nodes(to, engine):
    its_own = {
        "model": {"tokenizer": "/shared/tok"},
        "data": {"corpus": None, "path": "/shared/rows"},
        "engine": engine,
    }
    files = rendered(to, **its_own).files
    launch = files["launch.sh"].splitlines()
    at = launch.index("  for needed in /shared/rows /shared/tok; do")
    assert launch[at - 1] == 'if [ -z "${TRAIN_SCRIPT:-}" ]; then'  # your own reads what it reads
    assert json.loads(files["train.json"])["data"]["tokenizer"] == "/shared/tok"
    relative = its_own | {"model": {"tokenizer": "tok"}}
    with pytest.raises(JobError, match="D010"):
        rendered(to, **relative)


def test_text_is_found_where_the_job_file_says_and_never_read_twice(tmp_path):
    corpus = tmp_path / "job" / "corpus" / "inner"
    corpus.mkdir(parents=True)
    (corpus / "b.txt").write_bytes(b"second")
    (corpus.parent / "a.txt").write_bytes(b"first ")
    here = str(tmp_path / "job" / "corpus")
    (tmp_path / "launch").mkdir()
    assert text_of(tmp_path / "launch", ["corpus", here]) == b"first second"
    assert text_of(tmp_path / "job", ["corpus", here, f"{here}/**/*.txt"]) == b"first second"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_program_prints_a_loss_that_is_not_finite_and_ends(tmp_path, capsys, loss):
    made = program(tmp_path, None)
    made.say_step(6, 2.5)
    with pytest.raises(SystemExit, match=r"step 7: the loss is (nan|inf); the newest checkpoint"):
        made.say_step(7, loss)
    assert [line[:10] for line in capsys.readouterr().out.splitlines()] == [
        '{"step": 6',
        '{"step": 7',
    ]


def test_settings_name_the_files_beside_the_program_and_in_the_jobs_folder():
    plan, job = planned(data={"path": ["a.txt", "/abs/b.txt"], "corpus": None})
    paths = settings(plan, job)["data"]["paths"]
    assert paths == ["a.txt", str(job.folder / "a.txt"), "/abs/b.txt", "/abs/b.txt"]


ELSE: list[tuple[dict[str, Any], str]] = [
    ({"train": {"optimizer": "adafactor"}}, "optimizer adafactor"),
    ({"train": {"compile": True}}, "compiled blocks"),
    ({"train": {"adapter": {"kind": "lora", "rank": 8}}}, "adapters (lora)"),
    ({"train": {"gradient_compression": "powersgd"}}, "gradients sent as powersgd"),
    ({"model": {"preset": "bert-large", "decoder": None}}, "model bert-large"),
]
NEEDS: list[tuple[dict[str, Any], str]] = [
    ({"data": {"corpus": None, "sources": [{"path": "a.jsonl"}]}}, "data.sources (1)"),
    ({"model": {"tokenizer": "./tok"}, "data": {"kind": "chat"}}, "data.kind chat"),
]
ONE_NODE = {
    "cluster": {"accelerator": "H100-SXM", "nodes": 1, "per_node": 8},
    "layout": {"tensor": 1, "pipeline": 1, "context": 1, "sharding": "none"},
}


@pytest.mark.parametrize(("changes", "lacks"), ELSE)
def test_the_program_ends_rather_than_train_something_else(tmp_path, changes, lacks):
    plan, job = planned(**ONE_NODE, **changes)
    with pytest.raises(SystemExit, match=re.escape(f"train.py has no {lacks}: set TRAIN_SCRIPT")):
        program(tmp_path, None).check(settings(plan, job))
    plain = settings(*planned(**ONE_NODE))
    program(tmp_path, None).check(plain)
    program(tmp_path, None).check(plain | {"optimizer": "sgd"}, optimizers=("adamw", "sgd"))


@pytest.mark.parametrize(("changes", "lacks"), NEEDS, ids=[lacks for _, lacks in NEEDS])
def test_the_program_ends_rather_than_leave_out_weights_or_read_rows_as_bytes(
    tmp_path, changes, lacks
):
    plan, _ = planned(**ONE_NODE)
    with pytest.raises(SystemExit, match=re.escape(lacks)):
        program(tmp_path, None).check(settings(plan, job_of(**ONE_NODE, **changes)))


@pytest.mark.parametrize("engine", ["torchrun", "accelerate", "slurm", "tensorflow", "sky"])
@pytest.mark.parametrize(("changes", "lacks"), ELSE)
def test_what_ends_the_program_is_a_gap_of_each_engine(engine, changes, lacks):
    said = [gap for gap in rendered(engine, **ONE_NODE, **changes).gaps if gap.nearest is not None]
    key = next(iter(changes))
    assert any(gap.where.startswith(key) and "TRAIN_SCRIPT" in str(gap.nearest) for gap in said)


@pytest.mark.parametrize(
    "name", ["torchrun", "accelerate", "deepspeed", "ray", "mlx", "tensorflow"]
)
def test_every_example_program_looks_before_it_trains(name):
    scripts = Path(render.__file__).parent / "scripts"
    text = (scripts / f"train_{name}.py").read_text()
    end = text[text.index("def main(") if "def main(" in text else text.index("__main__") :]
    assert "check(" in end


@pytest.mark.parametrize("engine", ["kubernetes", "ray", "kfp"])
def test_where_the_example_is_what_runs_it_is_refused(engine):
    with pytest.raises(RenderError) as caught:
        rendered(engine, **ONE_NODE, train={"optimizer": "muon"})
    assert [problem.code for problem in caught.value.problems] == ["H002"]
    assert "train.optimizer" in caught.value.problems[0].where


@pytest.mark.parametrize(
    "train", [{"optimizer": "adafactor"}, {"compile": True}, {"precision": "fp16"}]
)
def test_nothing_is_rented_for_a_program_that_would_end_at_once(train):
    plan, job = planned(**ONE_NODE, train=train)
    render_job("sky", plan, job)
    with pytest.raises(RenderError) as caught:
        render_job("sky", plan, job, own_program=False)
    assert caught.value.problems[0].code == "H002"


def test_a_seed_has_63_bits():
    planned(train={"seed": 2**63 - 1})
    with pytest.raises(JobError, match="seed"):
        planned(train={"seed": 2**63})


def test_files_of_a_job_without_data_say_so_when_written_and_at_their_start(tmp_path: Path):
    """render said nothing, and train.py ended after minutes, once it had built the model."""
    found = rendered("torchrun", data={"seq_len": 128, "corpus": None})
    (gap,) = [gap for gap in found.gaps if gap.where == "data.path"]
    assert str(gap.nearest).startswith(
        "the example train.py stops before its first step; start a script of your"
    )
    assert not [gap for gap in rendered("torchrun").gaps if gap.where == "data.path"]
    with pytest.raises(SystemExit, match="names no data"):
        program(tmp_path, None).check(json.loads(found.files["train.json"]))


def test_a_model_that_only_one_stage_can_train_is_fixed_by_no_pipeline():
    """The fix was a script of one's own alone; without a pipeline the example trains it."""
    model = {"model": {"preset": "phi-3-mini", "decoder": None}, "engine": "deepspeed"}
    gaps = rendered("deepspeed", **model, layout={"pipeline": 2}).gaps
    (gap,) = [each for each in gaps if each.what == "the model phi-3-mini"]
    assert gap.fix == "layout.pipeline: 1"
    alone = rendered("deepspeed", **model, layout={"pipeline": 1}).gaps
    assert all(each.what != gap.what for each in alone)
