"""What a run's model makes of prompts at the end of the run."""

import importlib.util
import os
from pathlib import Path

import msgspec
import pytest

from paceline.job.packages import install_line

pytest.importorskip("transformers")
import torch
from click.testing import CliRunner
from tests.prepare.conftest import make_tokenizer
from tests.report import made
from tests.runtime.exported import write_run

from paceline.cli.run import command
from paceline.errors import JobError
from paceline.job.prompts import Prompt
from paceline.launch.export import export, plan_export
from paceline.launch.outputs import lacks_outputs, make_outputs
from paceline.launch.ready import check_can_run
from paceline.record.outputs import Generation, read_outputs
from paceline.runtime.checkpoint.state_files import write_state
from paceline.runtime.generate import _Tokenizer

DECODER = "{decoder: {layers: 2, hidden: 32, heads: 4}}"
NUM_TOKENS = 6


def made_by(run):
    """What the run's folder says, and the command shows one by one."""
    shown = []
    make_outputs(run, shown.append)
    outputs = read_outputs(run.path)
    assert {each.step for each in shown} == {each.step for each in outputs.by_step}
    return outputs


def with_prompts(tmp_path: Path, *lines: str):
    """A run of bytes whose job has prompts."""
    run = write_run(tmp_path, DECODER)
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    text = run.job_file.read_text()
    text = text.replace("  prompts: null\n", "  prompts: prompts.txt\n")
    text = text.replace("  prompt_tokens: 128\n", f"  prompt_tokens: {NUM_TOKENS}\n")
    run.job_file.write_text(text)
    return run


LM_EVAL = """
import os


def simple_evaluate(*, model, model_args, tasks, device, batch_size, log_samples, task_manager):
    assert model == "hf" and not task_manager.include_defaults
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        assert os.environ[name] == "1"
    if any("fails" in task for task in tasks):
        raise ValueError("no such metric")
    print('[{"task": "not", "metric": "the answer"}]')
    results = {
        task["task"]: {
            "alias": task["task"],
            "acc,none": task["doc_to_text"].count("x") / 8,
            "acc_stderr,none": 0.125,
            "exact_match,strict": float("nan"),
            "exact_match_stderr,strict": "N/A",
            "sample_len": 99,
        }
        for task in tasks
    }
    return {
        "results": results,
        "n-samples": {name: {"original": 99, "effective": len(results) + 5} for name in results},
    }
"""
TASK_MANAGER = """
class TaskManager:
    def __init__(self, *, include_defaults):
        self.include_defaults = include_defaults
"""


def with_tasks(tmp_path: Path, monkeypatch, *texts: str):
    """A run with tasks and a tokenizer, and a harness that answers by itself."""
    (tmp_path / "fake/lm_eval").mkdir(parents=True)
    (tmp_path / "fake/lm_eval/__init__.py").write_text(LM_EVAL)
    (tmp_path / "fake/lm_eval/tasks.py").write_text(TASK_MANAGER)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (f"{tmp_path}/fake", before))))
    run = write_run(tmp_path, DECODER)
    (tmp_path / "tokenizer.json").write_text("{}")
    names = [f"task{number}" for number, _ in enumerate(texts)]
    for name, text in zip(names, texts, strict=True):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: json\n{text}\n")
    job = run.job_file.read_text()
    assert "  tasks: []\n" in job
    asked = ", ".join(f"{name}.yaml" for name in names)
    job = job.replace("  tasks: []\n", f"  tasks: [{asked}]\n")
    job = job.replace("  tokenizer: auto\n", f"  tokenizer: {tmp_path}\n")
    run.job_file.write_text(job)
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
    outputs = made_by(run)
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
    assert not list(run.path.glob(".outputs-*"))


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """A finished run of 45 steps, of which every tenth was chosen; step 30 has no checkpoint."""
    run = with_prompts(tmp_path, "This is")
    text = run.job_file.read_text()
    run.job_file.write_text(text.replace("outputs_every: null\n", "outputs_every: 10\n"))
    for step in (10, 40, 45):
        write_state(run.checkpoints, {}, step)
    run.metrics_file.write_bytes(msgspec.json.encode(made.line(45, 9.0)) + b"\n")
    run.events_file.write_bytes(
        b"".join(
            msgspec.json.encode(each) + b"\n"
            for each in (made.started(), made.finished(9.5, step=45))
        )
    )

    def answer(module, request, kind):
        return (Generation(prompt="This is", text=request["folder"], is_cut=False),)

    monkeypatch.setattr("paceline.launch.outputs.ask", answer)
    monkeypatch.setattr(
        "paceline.launch.outputs._exported", lambda run, job, checkpoint, out: checkpoint.name
    )
    return run


def test_chosen_steps_are_done_from_their_checkpoints_and_one_that_is_missing_is_named(chosen):
    outputs = made_by(chosen)
    texts = [(step, each.text) for step, each in outputs.all_generations]
    assert texts == [(step, f"step-{step:08d}") for step in (10, 20, 40, 45)]
    assert outputs.step == outputs.last_step == 45
    problems = {each.step: each.problem for each in outputs.by_step if each.problem}
    assert list(problems) == [30]
    assert "no checkpoint of step 30; complete ones are of steps: 10, 20, 40, 45" in problems[30]


def test_a_finished_run_whose_command_was_killed_before_prompts_is_resumed_to_do_them(chosen):
    def resume():
        return CliRunner().invoke(
            command, ["--resume", str(chosen.path), "--no-report"], catch_exceptions=False
        )

    assert lacks_outputs(chosen)
    done = resume()
    assert done.exit_code == 0, done.output
    assert "evaluate.prompts after step 40: 1 continuation" in done.output
    assert not lacks_outputs(chosen)
    with pytest.raises(JobError, match="is at step 45 already"):
        resume()


def test_a_run_whose_prompts_are_gone_says_so_and_is_finished_all_the_same(tmp_path):
    run = with_prompts(tmp_path, "This is")
    (tmp_path / "prompts.txt").unlink()
    outputs = made_by(run)
    assert outputs.generations == ()
    assert "prompts.txt cannot be read" in str(outputs.problem)


def test_prompts_are_read_before_a_run_starts_and_only_where_files_are(tmp_path):
    run = with_prompts(tmp_path, "")
    found = {problem.code for problem in check_can_run(run.job(), run.plan())}
    assert "J014" in found
    found = {p.code for p in check_can_run(run.job(), run.plan(), place="kubernetes")}
    assert "W027" in found
    assert "J014" not in found


def test_tasks_are_done_by_the_harness_in_a_process_that_downloads_nothing(tmp_path, monkeypatch):
    metrics = "metric_list: [{metric: acc}, {metric: unheard}]"
    run = with_tasks(tmp_path, monkeypatch, "doc_to_text: xxx", f"doc_to_text: x\n{metrics}")
    monkeypatch.setattr("paceline.launch.outputs._exported", lambda *asked: str(tmp_path))
    outputs = made_by(run)
    assert outputs.problem is None
    assert [str(score) for score in outputs.scores] == [
        "task0 acc 0.375 ± 0.12 (7 samples)",
        "task0 exact_match (strict) no value (7 samples)",
        "task1 acc 0.125 ± 0.12 (7 samples)",
        "task1 exact_match (strict) no value (7 samples)",
        "task1 unheard no value (7 samples)",
    ]


def test_an_evaluation_that_fails_is_a_problem_of_the_outputs(tmp_path, monkeypatch):
    run = with_tasks(tmp_path, monkeypatch, "fails: true")
    monkeypatch.setattr("paceline.launch.outputs._exported", lambda *asked: str(tmp_path))
    outputs = made_by(run)
    assert outputs.scores == ()
    assert outputs.problem == "evaluating tasks ended with 1: ValueError: no such metric"


def test_tasks_are_read_before_a_run_starts_and_only_where_files_are(tmp_path, monkeypatch):
    run = with_tasks(tmp_path, monkeypatch, "doc_to_text: x")

    def found(**where):
        problems = check_can_run(run.job(), run.plan(), **where)
        return [problem for problem in problems if "evaluate.tasks" in problem.what]

    assert found() == []
    (place,) = found(place="kubernetes")
    assert place.code == "W027"
    (tmp_path / "task0.yaml").unlink()
    (gone,) = found()
    assert gone.code == "J014"
    looked_for = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lm_eval" else looked_for(name)
    )
    package, _ = found()
    assert (package.code, package.fix) == ("R010", install_line("eval"))


def test_conversations_are_rendered_with_a_turn_for_the_model_to_write(tmp_path):
    tokenizer = _Tokenizer(str(make_tokenizer(tmp_path)))
    ids = tokenizer.encode(Prompt(messages=[{"role": "user", "content": "Hello?"}]))
    whole = tokenizer._tokenizer.decode(ids)
    assert whole == "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(Prompt(text="fox"))) == "fox"
