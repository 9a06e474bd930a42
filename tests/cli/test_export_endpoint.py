"""`paceline export --for fastapi`: the program that it writes answers a client over HTTP."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click import UsageError
from click.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import torch
import transformers
from tests.cli.test_other_checkpoints import here
from tests.prepare.conftest import make_tokenizer
from tests.runtime.exported import CONFIGS, write_base, write_run

from paceline.cli.export import command
from paceline.errors import CheckpointError, JobError
from paceline.render.serve import check_servable

DECODER = "{decoder: {layers: 2, hidden: 32, heads: 4}}"


def call(*args: object) -> str:
    """Standard output."""
    done = CliRunner().invoke(command, [str(arg) for arg in args], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the endpoint in a folder, started as its first lines say."""
    words = [sys.executable, "-m", "uvicorn", "serve:app", "--host", "127.0.0.1", "--port", "0"]
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as file, subprocess.Popen(words, cwd=folder, stderr=file) as server:
        try:
            found = None
            while found is None:
                assert server.poll() is None, log.read_text()
                found = re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())
            yield found[1]
        finally:
            server.terminate()
            server.wait(30)


def ask(address: str, given: object = None) -> tuple[int, Any]:
    """Status and answer; without anything given, of GET."""
    body = None if given is None else json.dumps(given).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.filterwarnings("ignore")
def test_s0_27_an_exported_run_answers_over_http_what_its_model_computes(tmp_path: Path):
    run = write_run(tmp_path, DECODER)
    out = tmp_path / "endpoint"
    assert "uvicorn serve:app" in call(run.path, out, "--no-check", "--for", "fastapi")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    texts = ["This is text", "a", "number 3. This is te"]
    expected = []
    for text in texts:
        given = torch.tensor([list(text.encode())])
        written = model.generate(given, max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected.append(bytes(written[0, given.shape[1] :].tolist()).decode(errors="replace"))
    asked = [{"prompt": text, "max_tokens": 8} for text in texts]
    with served(out) as address:
        status, health = ask(f"{address}/health")
        assert (status, health["status"], health["task"]) == (200, "ok", "generate")
        assert health["parameters"] == sum(each.numel() for each in model.parameters())
        singles = [ask(f"{address}/predict", each) for each in asked]
        assert [answer["text"] for _, answer in singles] == expected
        assert singles[0] == (200, {"text": expected[0], "tokens": 8, "finish": "max_tokens"})
        mixed = [*asked, {"prompt": "a", "max_tokens": 3}]
        status, batch = ask(f"{address}/predict/batch", {"inputs": mixed})
        assert [each["text"] for each in batch["outputs"]][:3] == expected
        assert batch["outputs"][3]["tokens"] == 3
        many = [{"prompt": "a", "max_tokens": 1}] * 101
        assert len(ask(f"{address}/predict/batch", {"inputs": many[:100]})[1]["outputs"]) == 100
        status, refused = ask(f"{address}/predict/batch", {"inputs": many})
        assert (status, "at most 100" in refused["detail"][0]["msg"]) == (422, True)
        for wrong, why in (
            ({"prompt": "a", "max_token": 3}, "Extra inputs are not permitted"),
            ({"max_tokens": 3}, "give either prompt or messages"),
            ({"messages": [{"role": "user", "content": "a"}]}, "no chat template; give prompt"),
            ({"prompt": ""}, "at least 1 character"),
            ({"prompt": "a" * 1_000_001}, "at most 1000000 characters"),
        ):
            status, refused = ask(f"{address}/predict", wrong)
            assert (status, why in json.dumps(refused)) == (422, True)
        status, refused = ask(f"{address}/predict", {"prompt": "a" * 4000})
        assert (status, refused["detail"].startswith("input 0: 4000 tokens and 64")) == (422, True)
    with pytest.raises(JobError, match="has no tokenizer"):
        call(out, "--for", "fastapi")


@pytest.mark.repeat  # an endpoint that answers is above
@pytest.mark.filterwarnings("ignore")
def test_s0_27_a_folder_of_a_classifier_gets_an_endpoint_that_labels(tmp_path: Path):
    folder = tmp_path / "classifier"
    make_tokenizer(folder)
    sizes = CONFIGS["llama"] | {"vocab_size": 400, "pad_token_id": 0}
    labels = {0: "bad", 1: "good", 2: "neither"}
    config = transformers.LlamaConfig(**sizes, id2label=labels)
    torch.manual_seed(3)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"pad_token": "<|endoftext|>"}))
    call(folder, "--for", "fastapi")
    call(folder, "--for", "fastapi")  # the same files again
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["How are you?", "The quick brown fox jumps over the lazy dog.", "x"]
    with torch.inference_mode():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    with served(folder) as address:
        assert ask(f"{address}/health")[1]["architecture"] == "LlamaForSequenceClassification"
        inputs = [{"text": text} for text in texts]
        answers = ask(f"{address}/predict/batch", {"inputs": inputs})[1]["outputs"]
        for answer, row in zip(answers, logits, strict=True):
            assert answer["label"] == labels[int(row.argmax())]
            shares = [answer["scores"][name] for name in labels.values()]
            assert shares == pytest.approx(row.softmax(-1).tolist(), abs=1e-5)
        assert ask(f"{address}/predict", inputs[1])[1]["label"] == answers[1]["label"]
        status, refused = ask(f"{address}/predict", {"text": "x " * 100})
        assert (status, "more than the model's 64" in refused["detail"]) == (422, True)
    (folder / "serve.py").write_text("mine")
    with pytest.raises(JobError, match=r"another serve\.py already, which is not overwritten"):
        call(folder, "--for", "fastapi")
    with pytest.raises(UsageError, match="leave out OUT"):
        call(folder, tmp_path / "out", "--for", "fastapi")
    with pytest.raises(UsageError, match="leave out --merge"):
        call(folder, "--merge", "--for", "fastapi")


@pytest.mark.parametrize(
    "model",
    ["{pretrained: base, tokenizer: bytes}", pytest.param(DECODER, marks=pytest.mark.repeat)],
)
def test_s0_27_adapters_alone_are_refused_and_merged_they_are_served(tmp_path: Path, model: str):
    write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path, model, adapter=True)
    with pytest.raises(JobError, match=r"adapters alone.*\n.*\n.*--merge"):
        call(run.path, tmp_path / "out", "--for", "fastapi")
    assert not (tmp_path / "out").exists()
    call(run.path, tmp_path / "out", "--merge", "--no-check", "--for", "fastapi")
    assert "TOKENS_ARE_BYTES = True" in (tmp_path / "out/model.py").read_text()


def test_s0_27_a_folder_of_peft_is_told_how_it_is_merged_first(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(JobError, match="checkpoint convert FOLDER OUT --to safetensors --merge"):
        call(tmp_path, "--for", "fastapi")


@pytest.mark.parametrize(
    ("config", "names", "why"),
    [
        ({"architectures": ["BertModel"]}, ["tokenizer.json", "x.safetensors"], "names BertModel"),
        ({}, ["tokenizer.json", "x.safetensors"], "names no architecture"),
        ({"architectures": ["GPT2LMHeadModel"]}, ["tokenizer.json", "x.bin"], "no weights"),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "problem_type": "multi_label_classification",
            },
            ["tokenizer.json", "x.safetensors"],
            "its labels are multi_label_classification",
        ),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
            ["tokenizer.json", "x.safetensors"],
            "its labels are one number",
        ),
    ],
)
def test_s0_27_what_no_endpoint_can_answer_for_is_refused(config, names, why: str):
    (problem,) = check_servable(config, names, tokens_are_bytes=False, where="folder")
    assert why in problem.what


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", ["cut off", "NaN", "another tokenizer"])
def test_s0_27_no_endpoint_is_written_beside_damaged_weights(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.launch.inspect_external.ask", here)
    folder = tmp_path / "model"
    make_tokenizer(folder)
    rows = 300 if damage == "another tokenizer" else 400
    config = transformers.LlamaConfig(**CONFIGS["llama"] | {"vocab_size": rows})
    model = transformers.LlamaForCausalLM(config)
    if damage == "NaN":
        model.lm_head.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    if damage == "cut off":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    before = sorted(folder.iterdir())
    with pytest.raises((CheckpointError, JobError)) as refused:
        call(folder, "--for", "fastapi")
    assert isinstance(refused.value, CheckpointError)
    assert sorted(folder.iterdir()) == before
