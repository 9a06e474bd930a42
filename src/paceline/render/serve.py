"""A program that answers HTTP requests with the model of a Hugging Face folder, by FastAPI.

`serve.py` has the routes; `model.py` loads the folder that it lies in, and is one of two: a
language model's or a classifier's.

Leaves out: login, TLS and several processes, which the server in front of it has.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from paceline.errors import Problem
from paceline.render.example import script_text

ADAPTER = "adapter_config.json"
"""File of peft beside adapters."""

_GENERATES = ("ForCausalLM", "LMHeadModel")
_CLASSIFIES = "ForSequenceClassification"
_REQUIREMENTS = "fastapi>=0.115\nuvicorn>=0.30\ntorch>=2.11\ntransformers>=5\n"
_BYTES = "TOKENS_ARE_BYTES = "


def serve_files(config: Mapping[str, Any], *, tokens_are_bytes: bool = False) -> dict[str, str]:
    """The endpoint's files by name, to be written beside the weights.

    Args:
        config: The folder's config.json, of which `check_servable` finds nothing.
        tokens_are_bytes: Whether the model was trained on bytes, without a tokenizer.
    """
    classifies = _architecture(config).endswith(_CLASSIFIES)
    model = script_text("serve_classify.py" if classifies else "serve_generate.py")
    if tokens_are_bytes:
        assert f"{_BYTES}False" in model, "a classifier has a tokenizer"
        model = model.replace(f"{_BYTES}False", f"{_BYTES}True")
    return {"serve.py": script_text("serve.py"), "model.py": model} | {
        "requirements.txt": _REQUIREMENTS
    }


def check_servable(
    config: Mapping[str, Any], names: Collection[str], *, tokens_are_bytes: bool, where: str
) -> Iterator[Problem]:
    """What keeps the endpoint from answering with a folder's model.

    Args:
        config: Its config.json; empty where there is none.
        names: Its files.
        tokens_are_bytes: Whether the model was trained on bytes, without a tokenizer.
        where: The folder, for messages.
    """

    def refuse(why: str, fix: str) -> Problem:
        return Problem(code="C012", what=f"no endpoint for {where}: {why}", where="--for", fix=fix)

    if ADAPTER in names:
        yield refuse(
            "it holds adapters alone, without the model they belong to",
            "merge them: of a run `paceline export RUN OUT --merge --for fastapi`; of a folder "
            "`paceline checkpoint convert FOLDER OUT --to safetensors --merge`, then "
            "`paceline export OUT --for fastapi`",
        )
        return
    named = _architecture(config)
    classifies = named.endswith(_CLASSIFIES)
    if not classifies and not named.endswith(_GENERATES):
        yield refuse(
            f"config.json names {named or 'no architecture'}, which neither writes text "
            "(ForCausalLM) nor labels it (ForSequenceClassification)",
            "give a run or folder of such a model",
        )
    kind = config.get("problem_type")
    if classifies and (
        kind not in (None, "single_label_classification") or _num_labels(config) < 2
    ):
        yield refuse(
            f"its labels are {kind or 'one number'}, and the endpoint gives one label of several",
            "give a classifier of one label of several",
        )
    if classifies and tokens_are_bytes:
        yield refuse("it labels bytes, without a tokenizer", "name a tokenizer in model.tokenizer")
    if not any(name.endswith(".safetensors") for name in names):
        yield refuse(
            "it has no weights in safetensors",
            "paceline checkpoint convert FOLDER OUT --to safetensors",
        )
    if not tokens_are_bytes and not {"tokenizer.json", "tokenizer.model"} & set(names):
        yield refuse(
            "it has no tokenizer (tokenizer.json or tokenizer.model)",
            "give the run itself, with which the tokenizer is written, or copy the model's "
            "tokenizer files into the folder",
        )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _num_labels(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(config.get("num_labels", 2))
