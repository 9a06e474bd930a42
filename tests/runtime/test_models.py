"""The job's model as one factory, whichever way the job says it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.profile import resolve_decoder
from paceline.runtime.decoder import Decoder
from paceline.runtime.models import make_model

TOKENS_BS = torch.arange(32).reshape(2, 16)
GPT2 = (
    '{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, '
    '"vocab_size": 300}'
)


def job(model: str, folder: Path = Path("/nowhere")):
    text = (
        f"model: {model}\nprogram: mine:train\n"
        "data: {seq_len: 16}\ntrain: {global_batch: 8, steps: 9}\n"
    )
    return parse_job(text, source="job.yaml", folder=folder)


def built(model: str, folder: Path = Path("/nowhere")) -> nn.Module:
    asked = job(model, folder)
    make = make_model(asked, resolve_decoder(asked))
    torch.manual_seed(3)
    return make()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes mine.py into the job's folder, which is on no path before and after."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def put(text: str) -> Path:
        (tmp_path / "mine.py").write_text(text)
        return tmp_path

    yield put
    sys.modules.pop("mine", None)


def refused(folder: Path, model: str = '{factory: "mine:make"}'):
    with pytest.raises(JobError) as caught:
        built(model, folder)
    (problem,) = caught.value.problems
    assert problem.where == "model.factory, job.yaml line 1"
    return problem


def test_the_built_in_decoder_is_built_where_the_model_is_one():
    model = built("{decoder: {layers: 2, hidden: 32, heads: 4}}")
    assert isinstance(model, Decoder)
    assert model(TOKENS_BS).shape == (2, 16, 256)


def test_any_other_config_is_built_by_transformers_the_same_with_the_same_seed(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(GPT2)
    model, again = (built("{hf_config: config.json}", tmp_path).eval() for _ in range(2))
    assert type(model).__name__ == "GPT2LMHeadModel"
    logits_BSV = model(TOKENS_BS)
    assert logits_BSV.shape == (2, 16, 300)
    assert torch.equal(logits_BSV, again(TOKENS_BS))


def test_a_published_model_is_built_on_meta_without_memory():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = built("{preset: mixtral-8x7b}")
    assert sum(parameter.numel() for parameter in model.parameters()) == 46_702_792_704
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_factory_is_imported_from_the_jobs_folder_and_may_return_a_hugging_face_model(write):
    pytest.importorskip("transformers")
    folder = write(
        "import torch, transformers\n"
        "def plain(): return torch.nn.Linear(3, 4)\n"
        "def hf(): return transformers.GPT2LMHeadModel(transformers.GPT2Config(\n"
        "    n_embd=32, n_layer=1, n_head=2, vocab_size=300, bos_token_id=0, eos_token_id=0))\n"
    )
    assert isinstance(built('{factory: "mine:plain"}', folder), nn.Linear)
    assert built('{factory: "mine:hf"}', folder)(TOKENS_BS).shape == (2, 16, 300)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module", "when its module is imported, ModuleNotFoundError: No module"),
        ("make = (", "when its module is imported, SyntaxError"),
        ("x = 1", "has no attribute 'make'"),
        ("import sys\nsys.exit(3)", "when its module is imported, SystemExit: 3 (mine.py line 2)"),
        (
            "def make():\n    raise ValueError('ten heads\\nand more')",
            "when it builds the model, ValueError: ten heads (mine.py line 2)",
        ),
        ("def make():\n    return {}", "it returned a dict, not an nn.Module"),
        ("make = 3", "when it builds the model, TypeError"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_problem_that_says_why_and_where(write, text, says):
    problem = refused(write(text))
    assert problem.code == "J009"
    assert problem.what.startswith("the model mine:make could not be built: ")
    assert says in problem.what
    assert "\n" not in problem.what


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        (
            "import torch\nx = torch.zeros(1).cuda()\ndef make(): pass",
            "when its module is imported",
        ),
        (
            "import torch\ndef make(): return torch.nn.Linear(1, 1, device='cuda')",
            "when it builds the model",
        ),
    ],
)
def test_a_factory_that_reaches_for_cuda_is_told_so(write, text, moment):
    if torch.cuda.is_available():
        pytest.skip("SKIPPED: with a GPU nothing is raised")
    problem = refused(write(text))
    assert problem.code == "M010"
    assert problem.what.startswith(f"the model mine:make reaches for CUDA {moment}: ")
    assert "(mine.py line 2)" in problem.what


def test_a_module_that_starts_cuda_at_import_is_told_so_also_where_there_is_a_gpu(
    write, monkeypatch
):
    folder = write("import torch\ntorch.cuda.started = True\ndef make(): pass")
    monkeypatch.setattr(torch.cuda, "started", False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: torch.cuda.started)
    problem = refused(folder)
    assert problem.code == "M010"
    assert "it starts CUDA there" in problem.what
