"""Tensors of weight files beside those of the built-in decoder, by names and shapes."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.job.safetensors import StoredTensor
from paceline.profile.fitting import check_decoder_tensors, decoder_tensors
from paceline.profile.hf_names import to_hf_name
from paceline.profile.shape import DecoderShape

SHAPE = DecoderShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    vocab=67,
    tied_embeddings=True,
    qkv_bias=True,
)


def stored(shapes: dict[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name=name, path=Path("x"), dtype="BF16", shape=size, start=0)
        for name, size in shapes.items()
    }


def files() -> dict[str, tuple[int, ...]]:
    """As the model's own files have them, a tied head left out."""
    shapes = {str(to_hf_name(name)): size for name, size in decoder_tensors(SHAPE).items()}
    del shapes["lm_head.weight"]
    return shapes


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_the_names_and_shapes_are_those_of_the_decoder(qkv_bias: bool):
    torch = pytest.importorskip("torch")
    from paceline.runtime.decoder import Decoder

    shape = replace(SHAPE, qkv_bias=qkv_bias)
    with torch.device("meta"):
        model = Decoder(shape, 16)
    found = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    assert decoder_tensors(shape) == found


def test_files_of_the_model_fit_with_and_without_what_may_be_there():
    fit = files()
    bare = {name.removeprefix("model."): size for name, size in fit.items()}
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    for shapes in (fit, bare, fit | {"lm_head.weight": (67, 32)}, fit | tables):
        assert not list(check_decoder_tensors(SHAPE, stored(shapes), where="here"))


def test_everything_that_does_not_fit_is_named():
    shapes = files()
    del shapes["model.layers.1.mlp.up_proj.weight"]
    del shapes["model.embed_tokens.weight"]
    shapes["model.layers.2.mlp.up_proj.weight"] = (48, 32)
    shapes["model.norm.weight"] = (31,)
    missing, left_over, wrong = check_decoder_tensors(SHAPE, stored(shapes), where="here")
    assert {each.code for each in (missing, left_over, wrong)} == {"M013"}
    assert "2 tensors that the model has are not in the files" in missing.what
    assert "model.embed_tokens.weight" in missing.what
    assert "model.layers.1.mlp.up_proj.weight" in missing.what
    assert left_over.what.endswith("not in the model: model.layers.2.mlp.up_proj.weight")
    assert "model.norm.weight (31, not 32)" in wrong.what


def test_an_untied_head_is_missed():
    (problem,) = check_decoder_tensors(
        replace(SHAPE, tied_embeddings=False), stored(files()), where="here"
    )
    assert problem.what.endswith("not in the files: lm_head.weight")


def test_weights_of_a_type_that_is_not_read_are_named_and_tables_are_not():
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    found = stored(files() | tables)
    for name in ("model.norm.weight", *tables):
        found[name] = replace(found[name], dtype="I8")
    (problem,) = check_decoder_tensors(SHAPE, found, where="here")
    assert problem.code == "M014"
    assert problem.what == "1 tensors are stored as I8: model.norm.weight"
