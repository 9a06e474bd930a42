"""A Hugging Face causal language model from the fields of its config.json, with drawn weights.

What comes back is the class of transformers itself, with its own parameter names, and besides that
can be called as every model here is: `model(tokens_BS)` returns `logits_BSV`. Called in any other
way (`model(input_ids=..., labels=...)`) it is what it always was.

Letters in tensor names:
    B  samples in a micro-batch        H  width of the residual stream
    S  tokens in a sample              V  size of the vocabulary

Leaves out: pretrained weights, key/value caches and generation, the auxiliary loss of routers
(`strategy/expert/balance.py` has it), attention masks for padding (our data has none), code that a
config.json brings along.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError, PlanError, reason_of
from paceline.units import with_article

_DROPPED = (
    "_attn_implementation",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "dtype",
    "model_type",
    "output_router_logits",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Fields of a config.json that are ours to say, or name code we do not run."""

_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""No token of unpadded text is special; torch would leave a padding token's embedding untrained."""


def build_hf(
    config: Mapping[str, Any],
    *,
    source: str = "config.json",
    where: str = "model.hf_config",
    classifies: bool = False,
) -> nn.Module:
    """The causal language model of a config.json, in float32, on torch's current device.

    It is built on the meta device and its weights are drawn in place, so that nothing is drawn
    twice and the same seed gives the same weights whichever device it is built for. On meta
    (`with torch.device("meta")`) it holds no memory: `to_empty(device=...)`, then `reset_hf`.

    Args:
        classifies: With a head for the classes of `id2label` in place of the one for tokens. The
            model still answers for every token; the answer for a text is its last token's.

    Raises:
        JobError: `R010` without transformers; `R013` when transformers has no such causal language
            model, or will not build it from these fields.
    """
    device = torch.empty(0).device
    model = as_plain_model(_on_meta(config, source, where, classifies))
    if device.type != "meta":
        model.to_empty(device=device)
        reset_hf(model)
    return model.train()


def import_transformers(module: str, need: str) -> Any:
    """A module of transformers; `need` says what it is for.

    Raises:
        JobError: `R010`, it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what, fix = f"{need}: {error}", 'pip install "transformers>=5"'
        raise JobError.of(code="R010", what=what, where=sys.prefix, fix=fix) from None


def is_hf(model: nn.Module) -> bool:
    """Whether a module is a model of transformers, which need not be imported for this."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def as_plain_model(model: nn.Module) -> nn.Module:
    """A transformers model, changed so that `model(tokens_BS)` returns the logits tensor.

    A floating tensor instead of tokens is taken as `hidden_BSH`, what the blocks before this
    pipeline stage's made of them: it enters at the first block, whatever the model does to its
    embeddings on the way (Gemma scales them, GPT-2 adds positions). Where the output layer is
    another stage's, what the last block returns comes back.
    """
    if _PLAIN_CALL not in model.__dict__:
        setattr(model, _PLAIN_CALL, None)
        model.register_forward_pre_hook(_tokens_by_name, with_kwargs=True)
        model.register_forward_hook(_logits_alone, with_kwargs=True, always_call=True)
    return model


@torch.no_grad()
def reset_hf(model: nn.Module) -> None:
    """Draw every weight again from torch's generator, and compute the tables of positions.

    For a model whose memory was just given by `to_empty`. Every rank draws the whole model in the
    order of its modules: the same seed gives the same weights on every rank and in every layout.
    """
    inner: Any = model
    for each in (*model.modules(), *model.parameters(), *model.buffers()):
        each.__dict__.pop("_is_hf_initialized", None)
    inner.tie_weights()  # `to_empty` unties
    inner.initialize_weights()


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The list of blocks of a transformers model: its longest list of modules, outermost first."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    depth = getattr(model.config, "num_hidden_layers", None)
    whole = [each for each in lists if len(each) == depth] or lists
    if not whole:
        raise PlanError.of(
            code="L020",
            what=f"{type(model).__name__} has no list of blocks (an nn.ModuleList)",
            where="layout.pipeline",
            fix="set layout.pipeline to 1",
        )
    return whole[0]


def _on_meta(
    config: Mapping[str, Any], source: str, where: str, classifies: bool = False
) -> nn.Module:
    named = with_article(f"{config.get('model_type')} model")
    need = f"{named} needs transformers, which cannot be imported"
    transformers = import_transformers("transformers", need)
    kind = str(config.get("model_type")).lower()
    fields = {name: value for name, value in config.items() if name not in _DROPPED}
    fields |= dict.fromkeys(_TOKEN_IDS)
    kind_of_head = "SequenceClassification" if classifies else "CausalLM"
    try:
        read = transformers.AutoConfig.for_model(kind, **fields, use_cache=False)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, f"AutoModelFor{kind_of_head}").from_config(
                read, dtype=torch.float32
            )
    except Exception as error:  # noqa: BLE001 - whatever transformers says of the fields is shown
        made = "classifier" if classifies else "causal language model"
        raise JobError.of(
            code="R013",
            what=f"transformers {transformers.__version__} cannot build {source} as a {made}: "
            + reason_of(error),
            where=where,
            fix="correct the field it names, or give model.factory and program with your own code",
        ) from None
    if classifies:
        read.pad_token_id = -1  # no token is: transformers asks for one in larger batches
    let_experts_be_any_type(model)
    return model


_BLOCKS_RETURN_TUPLES = ("bloom", "falcon", "gpt_neo", "gptj", "mpt")
"""Families whose model unpacks what a block returns: one of another stage hands a tensor on."""

NEW_HEAD = "score"
"""Name of a classifier's head, which no pretrained language model has. Source: transformers 5.23,
`GenericForSequenceClassification` and the families that have a class of their own."""

_PLAIN_CALL = "_paceline_plain_call"
"""Attribute of a model: what the call that is under way needs at its end, None between calls."""


class _PlainCall:
    """One call `model(tensor)` under way."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.last_hidden: Any = None


def _tokens_by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a call: name what was given, and see to where it enters and leaves the blocks."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return None
    given, call = args[0], _PlainCall()
    named: dict[str, Any] = {"input_ids": given}
    if given.is_floating_point():
        named = {"inputs_embeds": given}
        call.hooks.append(_enter(blocks_of(model)[0], given))
    config: Any = model.config
    if config.model_type in _BLOCKS_RETURN_TUPLES:
        call.hooks += [_as_tuple(block) for block in blocks_of(model) if _is_empty(block)]
    if isinstance(head := getattr(model, NEW_HEAD, None), nn.Linear):
        call.hooks.append(_keep(head, call))
    elif not _has_head(model):
        call.hooks.append(_leave(blocks_of(model)[-1], call))
    setattr(model, _PLAIN_CALL, call)
    return (), named


def _enter(block: nn.Module, hidden_BSH: Tensor) -> Any:
    def give(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return hidden_BSH, *args[1:]

    return block.register_forward_pre_hook(give)


def _keep(head: nn.Module, call: _PlainCall) -> Any:
    """A classifier picks one token's answer of each sample; ours has several texts in one."""

    def take(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call.last_hidden = output

    return head.register_forward_hook(take)


def _leave(block: nn.Module, call: _PlainCall) -> Any:
    def take(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call.last_hidden = output[0] if isinstance(output, tuple) else output

    return block.register_forward_hook(take)


def _as_tuple(block: nn.Module) -> Any:
    def wrap(_: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        return output if isinstance(output, tuple) else (output,)

    return block.register_forward_hook(wrap)


def _has_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and not _is_empty(head)


def _is_empty(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _logits_alone(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Tensor | None:
    """After a call, also one that failed: only the logits, when it was `model(tensor)`."""
    call: _PlainCall | None = getattr(model, _PLAIN_CALL)
    if call is None:
        return None
    setattr(model, _PLAIN_CALL, None)
    for hook in call.hooks:
        hook.remove()
    if output is None:  # the call raised
        return None
    result: Tensor = output.logits if call.last_hidden is None else call.last_hidden
    return result


def let_experts_be_any_type(model: nn.Module) -> None:
    """Experts in one kernel and in autocast's type, also where torch's kernel has no code: other
    types than bfloat16, odd widths.

    Autocast knows no `grouped_mm` (torch 2.13): experts would be multiplied in their own float32,
    one after the other, beside linears in bfloat16.

    torch's `grouped_mm` can be traced in bfloat16 only, knows no float64, and takes rows of a
    multiple of 16 bytes (torch 2.13, CPU). transformers has an operator of its own that takes the
    rest, computes the same sums expert by expert and can be traced; it asks this function which to
    use. The answer must not depend on whether values are there, so that a trace is of what runs.
    Nothing for a model without experts.

    Raises:
        JobError: `R010`, transformers is older than 5 and has no such experts.
    """
    if not any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return
    version = importlib.import_module("transformers").__version__
    need = f"{type(model).__name__} has routed experts, which need transformers 5 or newer, and "
    need += f"{version} is installed"
    moe = import_transformers("transformers.integrations.moe", need)
    asked = moe._can_use_grouped_mm
    if getattr(asked, "is_ours", False):
        return

    def can_use(tokens: Tensor, weights: Tensor, ends: Tensor) -> bool:
        widths = [size * weights.element_size() for size in weights.shape[-2:]]
        has_kernel = weights.dtype == torch.bfloat16 and all(width % 16 == 0 for width in widths)
        return has_kernel and asked(tokens, weights, ends)

    multiply = moe._grouped_mm

    def grouped_mm(tokens: Tensor, weights: Tensor, offs: Tensor) -> Any:
        if torch.is_autocast_enabled(tokens.device.type):
            narrow = torch.get_autocast_dtype(tokens.device.type)
            tokens, weights = tokens.to(narrow), weights.to(narrow)
        return multiply(tokens, weights, offs)

    can_use.is_ours = True  # type: ignore[attr-defined]
    moe._can_use_grouped_mm = can_use
    moe._grouped_mm = grouped_mm
