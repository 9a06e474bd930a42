"""Documents packed into one sample are computed as they are alone, in every layout.

In float64: what is left is the order of sums. A sample whose documents see each other, or whose
positions run on, differs by many orders of magnitude more.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.equality import (
    CONFIGS,
    ENDS,
    LAYOUTS,
    SEQ_LEN,
    SHAPE,
    alone_layout,
    deviation,
    layout_of,
    make_model,
    train,
)
from tests.runtime.tensor_models import compute_in_float64

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.parallel.layout import Layout
from paceline.profile.resolve import check_packing
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.strategy.compiling import compile_blocks
from paceline.runtime.strategy.context.documents import Documents

ROUNDING = 1e-12
"""As in `test_layouts.py`: sums of up to 4,096 terms in another order, over three steps."""

OF_TWO: dict[str, dict[str, Any]] = {
    "DDP": {"data": 2, "sharding": "none"},
    "FSDP2, recomputed": {"data": 2, "sharding": "full", "recompute": "full"},
    "TP": {"data": 1, "sharding": "none", "tensor": 2},
    "PP": {"data": 1, "sharding": "none", "pipeline": 2},
    "PP, recomputed": {"data": 1, "sharding": "none", "pipeline": 2, "recompute": "full"},
    "CP ring": {"data": 1, "sharding": "none", "context": 2},
    "CP ring, recomputed": {"data": 1, "sharding": "none", "context": 2, "recompute": "selective"},
    "CP ulysses": {"data": 1, "sharding": "none", "context": 2, "context_kind": "ulysses"},
}
OF_MODELS = {
    "built-in": [name for name in OF_TWO if name not in ("PP", "CP ring")],
    "llama": ["DDP", "CP ring"],
}
REPEATED = {"built-in": ["PP", "CP ring"], "llama": ["TP", "PP, recomputed"]}
"""The other of recomputed and not, and ways that the other model has."""


def train_all(rank: int, world: int, layouts: dict[str, dict[str, Layout]]) -> dict[str, Any]:
    compute_in_float64()
    return {
        kind: {name: train(layout, kind, packed="packed") for name, layout in of_kind.items()}
        for kind, of_kind in layouts.items()
    }


def train_apart(rank: int, world: int, kinds: list[str]) -> dict[str, Any]:
    """Documents one after another, and the same samples as if they were whole."""
    compute_in_float64()
    return {
        kind: (train(alone_layout(), kind, packed="apart"), train(alone_layout(), kind))
        for kind in kinds
    }


def check(world: int, fields: dict[str, dict[str, dict[str, Any]]]) -> None:
    layouts = {
        kind: {name: layout_of(each, {}) for name, each in of_kind.items()}
        for kind, of_kind in fields.items()
    }
    (apart,) = run_ranks(train_apart, 1, list(layouts))
    ranks = run_ranks(train_all, world, layouts)
    found = {
        (kind, name): deviation([rank[kind][name] for rank in ranks], apart[kind][0])
        for kind, of_kind in layouts.items()
        for name in of_kind
    }
    assert {name: each for name, each in found.items() if not each <= ROUNDING} == {}
    for documents, whole in apart.values():  # the test can fail
        assert deviation([whole], documents) > 1e-3


@pytest.mark.ranks
@pytest.mark.parametrize("models", [OF_MODELS, pytest.param(REPEATED, marks=pytest.mark.repeat)])
def test_packed_documents_train_as_documents_apart_do(models: dict[str, list[str]]):
    check(2, {kind: {name: OF_TWO[name] for name in names} for kind, names in models.items()})


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["built-in", *CONFIGS])
def test_packed_documents_train_as_documents_apart_do_in_every_layout(kind: str):
    check(4, {kind: LAYOUTS})


def losses_of_second(
    layout: Layout, tokens_BT: torch.Tensor, *, packed: bool, vocab: int = SHAPE.vocab
) -> float:
    """The evaluation loss of the second document's targets alone."""
    meshes = strategy.make_meshes(layout, "cpu")
    torch.manual_seed(0)
    whole = Decoder(replace(SHAPE, vocab=vocab, layers=2), SEQ_LEN).double()
    model = strategy.apply(whole, layout, meshes, precision="fp32")
    targets_BS = torch.full((len(tokens_BT), SEQ_LEN), strategy.IGNORED)
    targets_BS[:, 5:11] = tokens_BT[:, 6:12]
    batch: Any = (tokens_BT[:, :-1], targets_BS)
    if packed:
        batch = (*batch, torch.tensor([[5, 11, 16]] * len(tokens_BT)))
    batches = [tuple(part[at : at + 1] for part in batch) for at in range(len(tokens_BT))]
    seen = strategy.evaluate(model, meshes, batches, precision="fp32")
    torch.distributed.all_reduce(seen.loss_sum)
    return float(seen.loss_sum)


def perturb(rank: int, world: int, layouts: dict[str, Layout]) -> dict[str, Any]:
    """Losses of document 2 before and after a token of document 1 changed, packed and not."""
    tokens_BT = torch.randint(
        0, SHAPE.vocab, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1)
    )
    other_BT = tokens_BT.clone()
    other_BT[:, 2] = (other_BT[:, 2] + 1) % SHAPE.vocab
    return {
        name: [
            [
                losses_of_second(layout, each, packed=packed, vocab=2048 if "head" in name else 64)
                for each in (tokens_BT, other_BT)
            ]
            for packed in (True, False)
        ]
        for name, layout in layouts.items()
    }


@pytest.mark.ranks
def test_no_output_of_a_document_changes_with_a_token_of_the_one_before():
    names = ("DDP", "TP", "PP", "CP ring", "CP ulysses")
    layouts = {name: layout_of(OF_TWO[name] | {"micro_batch": 1}, {}) for name in names}
    layouts["PP, the head alone on its stage"] = layouts["PP"]
    for found in run_ranks(perturb, 2, layouts)[0].items():
        name, (packed, whole) = found
        assert packed[0] == packed[1], name
        assert whole[0] != whole[1], name


def alone(model: Any, ends: list[list[int]], seq_len: int = SEQ_LEN) -> Any:
    layout = alone_layout()
    meshes: Any = type("Meshes", (), {"layout": layout, "device_type": "cpu", "counts_loss": True})
    meshes.place = type("Place", (), {"context": 0, "data": 0})
    tokens_BS = torch.zeros(len(ends), seq_len, dtype=torch.int64)
    batch = tokens_BS, tokens_BS, torch.tensor(ends)
    return strategy.forward_backward(model, meshes, [batch], precision="fp32")


@pytest.mark.parametrize("kind", ["bloom", "falcon", "gpt_neo", "mpt"])
def test_families_whose_attention_or_positions_are_fixed_are_refused_by_name(kind):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "n_head": 2, "num_attention_heads": 2, "vocab_size": 32}
    more = {"mpt": {"d_model": 16, "n_heads": 2, "n_layers": 1}}.get(kind, {"n_layer": 1})
    layers = {"gpt_neo": {"num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2}}
    model = build_hf({"model_type": kind, **sizes, **more, **layers.get(kind, {})})
    with pytest.raises(JobError, match=f"R030: packed samples cannot be had with a {kind} model"):
        alone(model, [[5, 16]])


def test_a_model_that_does_not_ask_where_documents_end_is_refused():
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
    with pytest.raises(JobError, match=r"R030: .* did not call paceline\.runtime"):
        alone(model, [[5, 16]])


def test_compiled_blocks_are_refused():
    model = compile_blocks(make_model("built-in"), device_type="meta", backend="eager")
    with pytest.raises(JobError, match=r"R030: .* train\.compile"):
        alone(model, [[5, 16]])


def test_positions_restart_at_each_document_also_on_a_context_rank():
    ends, layout = torch.tensor(ENDS[:1]), layout_of(OF_TWO["CP ring"], {})
    whole = [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    assert Documents(ends, 16, alone_layout(), 0).positions(None)[0].tolist() == whole
    found = Documents(ends, 16, layout, 1).positions(None)[0].tolist()
    assert found == whole[4:8] + whole[8:12]


def test_a_plan_refuses_what_cannot_keep_documents_apart(tmp_path):
    (tmp_path / "bloom.json").write_text('{"model_type": "bloom", "hidden_size": 16, "n_head": 2}')
    text = "model: {hf_config: bloom.json}\ntrain: {global_batch: 2, steps: 1, compile: true}\n"
    job = parse_job(f"{text}data: {{corpus: python-stdlib}}", source="j", folder=tmp_path)
    compiled, family = check_packing(job)
    assert "train.compile" in compiled.what
    assert "a bloom model" in family.what
