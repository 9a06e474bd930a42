"""Section `model` of the job file: what to train."""

from pathlib import Path
from typing import Literal

from paceline.job.section import Auto, Count, Positive, section


@section
class DecoderSpec:
    """The built-in decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    layers: Positive
    """Decoder blocks."""

    hidden: Positive
    """Width of the residual stream."""

    heads: Positive
    """Attention heads; must divide `hidden`."""

    kv_heads: Positive | Auto = "auto"
    """Key and value heads; must divide `heads`. `auto` is one for each head."""

    ffn: Positive | Auto = "auto"
    """Width of the feed-forward layer. `auto`: 8/3 of `hidden`, rounded up to a multiple of 32."""

    vocab: Positive = 256
    """Size of the vocabulary. 256 is one entry a byte, which needs no tokenizer."""

    tied_embeddings: bool = False
    """Whether the output layer reuses the input embedding."""


MODEL_WAYS = ("decoder", "preset", "hf_config", "size", "factory", "pretrained")
"""Fields of `model` of which a job gives one."""


@section
class ModelSpec:
    """What to train. Exactly one of `decoder`, `preset`, `hf_config`, `size`, `factory` and
    `pretrained`."""

    decoder: DecoderSpec | None = None
    """The built-in decoder, by its sizes."""

    preset: str | None = None
    """A published model by name, such as `llama-3-8b`; `paceline catalog models` lists them."""

    hf_config: str | None = None
    """Path to a Hugging Face `config.json`, or a published model by name. Thirty families are
    planned for; the built-in trainer runs those that predict the next token
    (`paceline explain models`)."""

    size: Count | None = None
    """Parameters alone, such as `7B`: a Llama-like decoder between published ones."""

    factory: str | None = None
    """Your own `module:function` that returns an `nn.Module`, imported from the job's folder."""

    pretrained: str | None = None
    """Trained weights to start from: a folder with safetensors files and a `config.json`, relative
    to the job file, or the name of a model in this machine's Hugging Face cache."""

    revision: str | None = None
    """Branch, tag or commit of `pretrained` in the Hugging Face cache. Left out, `main`."""

    weights: Literal["drawn"] | None = None
    """`drawn` trains from random weights although trained ones lie beside the config. Left out, it
    is an error when weights lie beside `hf_config`, and `pretrained` loads its own."""

    tokenizer: str = "auto"
    """Text to token numbers: a folder with a `tokenizer.json`, or that file, relative to the job
    file. `bytes` is one token a byte. `auto` is that of `pretrained`, and `bytes` without one."""

    chat_template: str = "auto"
    """A `.jinja` file that writes conversations as text. `auto` is the tokenizer's own."""


def how_to_try(factory: str, folder: Path) -> str:
    """Fix of a factory, `module:function`, that cannot be built.

    >>> how_to_try("mymodel:build", Path("jobs"))
    "try it in jobs: `python -c 'import mymodel; mymodel.build()'`"
    """
    module, _, function = factory.partition(":")
    if not function:
        return f"write it as module:function, with the module in {folder}"
    return f"try it in {folder}: `python -c 'import {module}; {module}.{function}()'`"
