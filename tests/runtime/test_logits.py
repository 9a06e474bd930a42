"""Exported folders beside the run's own model."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
from tests.runtime.exported import write_base, write_run

from paceline.errors import JobError, RunError
from paceline.launch.convert import with_known_config
from paceline.record.conversion import Comparison, Conversion, LogitsCheck
from paceline.record.find_checkpoints import checkpoint_of_run
from paceline.record.run import RunFolder
from paceline.runtime.checkpoint import export, logits
from paceline.runtime.checkpoint.state_files import StateFiles, write_state
from paceline.runtime.state import FROZEN_STATE

pytestmark = pytest.mark.filterwarnings("ignore")


def exported(run: RunFolder, out: Path, **fields: Any) -> Comparison:
    """The run's newest checkpoint as safetensors, and how to compare them."""
    checkpoint = checkpoint_of_run(run.path)
    asked = with_known_config(
        Conversion(
            source=str(checkpoint),
            out=str(out),
            source_form="paceline",
            form="safetensors",
            **fields,
        )
    )
    done = export.convert(asked)
    assert done.before == done.after
    base = asked.adapters.base if asked.adapters is not None and not asked.merge else None
    return Comparison(
        run=str(run.path),
        checkpoint=str(checkpoint),
        folder=str(out),
        base=base,
        dtype=None if asked.adapters is not None else asked.dtype,
        tolerance=1e-3,
    )


def assert_equal(found: LogitsCheck, kind: str = "held-out") -> None:
    assert (found.not_made, found.problem, found.kind) == ("", None, kind)
    assert found.samples == 8
    assert found.positions == 32
    assert found.largest_difference is not None
    assert found.largest_logit is not None
    assert found.largest_difference <= 1e-4 * found.largest_logit
    assert found.largest_logit > 0.1


@pytest.mark.parametrize("name", ["decoder", "llama", "gpt2", "mixtral"])
def test_the_exported_folder_computes_what_the_runs_model_does(name: str, tmp_path: Path):
    model = "{decoder: {layers: 2, hidden: 32, heads: 4}}"
    if name != "decoder":
        write_base(tmp_path / "base", name)
        model = "{pretrained: base, tokenizer: bytes}"
    run = write_run(tmp_path, model)
    assert_equal(logits.compare(exported(run, tmp_path / "out")))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("merge", [False, True])
def test_adapters_compute_the_same_in_peft_and_merged(name: str, merge: bool, tmp_path: Path):
    pytest.importorskip("peft")
    write_base(tmp_path / "base", name, dtype=torch.float32)
    run = write_run(tmp_path, "{pretrained: base, tokenizer: bytes}", adapter=True)
    asked = exported(run, tmp_path / "out", merge=merge)
    assert (asked.base is None) is merge
    assert_equal(logits.compare(asked))


@pytest.mark.parametrize("name", ["decoder", "llama", "gpt2"])
def test_adapters_are_merged_into_the_weights_that_the_run_drew(name: str, tmp_path: Path):
    model = "{decoder: {layers: 2, hidden: 32, heads: 4}}"
    if name != "decoder":
        write_base(tmp_path / "base", name)
        model = "{hf_config: base/config.json, weights: drawn, tokenizer: bytes}"
    run = write_run(tmp_path, model, adapter=True)
    assert_equal(logits.compare(exported(run, tmp_path / "out", merge=True)))


def test_adapters_are_not_merged_into_other_weights_than_the_run_drew(tmp_path: Path):
    run = write_run(tmp_path, "{decoder: {layers: 2, hidden: 32, heads: 4}}", adapter=True)
    files = StateFiles(checkpoint_of_run(run.path))
    values = {name: partial(files.value, name) for name in files.names}
    write_state(run.checkpoints, {**values, FROZEN_STATE: "other".upper}, 21)
    with pytest.raises(RunError, match=r"R065: .*other frozen weights \(OTHER\)"):
        exported(run, tmp_path / "out", merge=True)


def test_adapters_beside_drawn_weights_in_4_bits_are_not_merged(tmp_path: Path):
    run = write_run(tmp_path, "{decoder: {layers: 2, hidden: 32, heads: 4}}", adapter=True)
    job = run.path / "job.yaml"
    job.write_text(job.read_text().replace("kind: lora", "kind: qlora"))
    with pytest.raises(JobError, match=r"C012: .*random weights in 4 bits, which no file has"):
        exported(run, tmp_path / "out", merge=True)


def test_rounded_weights_are_compared_rounded_and_what_rounding_changes_is_told(tmp_path: Path):
    run = write_run(tmp_path, "{decoder: {layers: 2, hidden: 32, heads: 4}}")
    found = logits.compare(exported(run, tmp_path / "out", dtype="bfloat16"))
    assert_equal(found)
    assert found.largest_rounding is not None
    assert found.largest_difference is not None
    assert found.largest_rounding > 10 * found.largest_difference
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}


def test_a_folder_with_another_tensor_is_a_problem(tmp_path: Path):
    run = write_run(tmp_path, "{decoder: {layers: 2, hidden: 32, heads: 4}}")
    asked = exported(run, tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"] *= -1
    save_file(tensors, file, metadata={"format": "pt"})
    found = logits.compare(asked)
    assert found.problem is not None
    assert found.problem.code == "C013"
    assert "computes other logits" in found.problem.what
    file.unlink()
    found = logits.compare(asked)
    assert found.problem is not None
    assert "does not load" in found.problem.what


def test_without_its_data_random_tokens_are_compared(tmp_path: Path):
    run = write_run(tmp_path, "{decoder: {layers: 2, hidden: 32, heads: 4}}")
    asked = exported(run, tmp_path / "out")
    for path in (tmp_path / "text").iterdir():
        path.unlink()
    assert_equal(logits.compare(asked), "random tokens")


def test_what_is_not_installed_is_why_the_check_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = write_run(tmp_path, "{decoder: {layers: 2, hidden: 32, heads: 4}}")
    asked = replace(exported(run, tmp_path / "out"), base="base")

    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(logits.importlib, "import_module", absent)
    found = logits.compare(asked)
    assert found.samples == 0
    assert found.not_made.startswith("transformers cannot be imported")
