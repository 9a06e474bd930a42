"""What a run's model makes of prompts at the end of the run."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch
from tests.prepare.conftest import make_tokenizer
from tests.runtime.exported import write_run

from paceline.launch.export import export, plan_export
from paceline.launch.outputs import make_outputs
from paceline.launch.ready import check_can_run
from paceline.record.outputs import read_outputs
from paceline.runtime.generate import _Tokenizer
from paceline.spec.prompts import Prompt

DECODER = "{decoder: {layers: 2, hidden: 32, heads: 4}}"
NUM_TOKENS = 6


def with_prompts(tmp_path: Path, *lines: str):
    """A run of bytes whose job has prompts."""
    run = write_run(tmp_path, DECODER)
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    text = run.job_file.read_text()
    text = text.replace("  prompts: null\n", "  prompts: prompts.txt\n")
    text = text.replace("  prompt_tokens: 128\n", f"  prompt_tokens: {NUM_TOKENS}\n")
    run.job_file.write_text(text)
    return run


def likeliest(folder: Path, prompt: str) -> str:
    """The continuation, each token from a pass over the whole text before it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = list(prompt.encode())
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return bytes(ids[len(prompt.encode()) :]).decode(errors="replace")


def test_prompts_are_continued_by_the_likeliest_tokens_of_the_runs_model(tmp_path):
    run = with_prompts(tmp_path, "This is", "text number")
    outputs = make_outputs(run)
    assert outputs.problem is None
    assert outputs.step == 20
    export(
        plan_export(run, run.checkpoints / "step-00000020", tmp_path / "out"),
        lambda exported: "",
        check=False,
    )
    assert [(each.prompt, each.text) for each in outputs.generations] == [
        (prompt, likeliest(tmp_path / "out", prompt)) for prompt in ("This is", "text number")
    ]
    assert all(each.is_cut for each in outputs.generations)
    assert read_outputs(run.path) == outputs
    assert not list(run.path.glob(".outputs-*"))


def test_a_run_whose_prompts_are_gone_says_so_and_is_finished_all_the_same(tmp_path):
    run = with_prompts(tmp_path, "This is")
    (tmp_path / "prompts.txt").unlink()
    outputs = make_outputs(run)
    assert outputs.generations == ()
    assert "prompts.txt cannot be read" in str(outputs.problem)


def test_prompts_are_read_before_a_run_starts_and_only_where_files_are(tmp_path):
    run = with_prompts(tmp_path, "")
    found = {problem.code for problem in check_can_run(run.job(), run.plan())}
    assert "J014" in found
    found = {p.code for p in check_can_run(run.job(), run.plan(), place="kubernetes")}
    assert "W027" in found
    assert "J014" not in found


def test_conversations_are_rendered_with_a_turn_for_the_model_to_write(tmp_path):
    tokenizer = _Tokenizer(str(make_tokenizer(tmp_path)))
    ids = tokenizer.encode(Prompt(messages=[{"role": "user", "content": "Hello?"}]))
    whole = tokenizer._tokenizer.decode(ids)
    assert whole == "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(Prompt(text="fox"))) == "fox"
