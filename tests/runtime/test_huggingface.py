"""Hugging Face models from their config.json: any family, on any device, in the runtime's terms."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import JobError
from paceline.runtime import huggingface
from paceline.runtime.huggingface import blocks_of, build_hf, reset_hf

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma": SIZES,
    "gemma2": SIZES,
    "gemma3_text": SIZES,
    "olmo2": SIZES,
    "phi3": SIZES,
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "gpt_oss": SIZES | {"num_local_experts": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt2": GPT2,
    "gpt_neo": SIZES
    | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": SIZES,
    "gptj": GPT2 | {"rotary_dim": 8},
    "bloom": {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "mpt": {"vocab_size": 300, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon": {
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "num_attention_heads": 4,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "phi": SIZES,
    "starcoder2": SIZES,
}
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")


@pytest.fixture(autouse=True)
def quiet_transformers():
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def small(kind):
    """A small model of a family; without dropout, so that every call gives the same."""
    torch.manual_seed(7)
    return build_hf({"model_type": kind, **SMALL[kind]}).eval()


def tokens(batch=2, seq_len=16):
    return torch.randint(0, 300, (batch, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", SMALL)
def test_every_family_turns_tokens_into_logits_and_is_itself_when_called_by_name(kind):
    model, tokens_BS = small(kind), tokens()
    logits_BSV = model(tokens_BS)
    assert logits_BSV.shape == (2, 16, 300)
    own = model(input_ids=tokens_BS, labels=tokens_BS)
    assert torch.equal(own.logits, logits_BSV)
    assert own.loss.ndim == 0
    assert own.past_key_values is None


@pytest.mark.parametrize("kind", SMALL)
def test_a_model_from_meta_is_the_one_built_directly_tables_included(kind):
    direct = small(kind)
    with torch.device("meta"):
        late = build_hf({"model_type": kind, **SMALL[kind]})
    assert all(tensor.is_meta for tensor in (*late.parameters(), *late.buffers()))
    late.to_empty(device="cpu")
    with torch.no_grad():  # what memory holds by chance must not pass for a value
        for tensor in (*late.parameters(), *late.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -77)
    torch.manual_seed(7)
    reset_hf(late)
    expected = {**dict(direct.named_parameters()), **dict(direct.named_buffers())}
    found = {**dict(late.named_parameters()), **dict(late.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", SMALL)
def test_tables_of_positions_are_those_transformers_computes_itself(kind):
    import transformers

    made = transformers.AutoConfig.for_model(kind, **{**SMALL[kind], "pad_token_id": None})
    theirs = dict(transformers.AutoModelForCausalLM.from_config(made).named_buffers())
    for name, buffer in small(kind).named_buffers():
        assert torch.equal(buffer, theirs[name]), name


class Skip(nn.Module):
    """Stands where a module of another stage was: hands the stream on, or adds nothing to it."""

    def forward(self, first=None, *_, **__):
        is_stream = first is not None and first.ndim == 3 and first.is_floating_point()
        return first if is_stream else torch.zeros(())


def put(model, name, module):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@pytest.mark.parametrize("kind", SMALL)
def test_a_model_cut_in_two_between_its_blocks_computes_the_same(kind):
    whole = small(kind)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    blocks_of(first)[1] = Skip()
    blocks_of(second)[0] = Skip()
    name_of = {id(module): name for name, module in whole.named_modules()}
    names = list(name_of.values())
    of_blocks = name_of[id(blocks_of(whole))]
    before = names[: names.index(of_blocks)]
    for name, module in whole.named_modules():
        holds = any(True for _ in module.parameters(recurse=False))
        if not holds or name.startswith(of_blocks):
            continue
        is_first = name in before and not name.endswith(("project_out", "final_layer_norm"))
        put(second if is_first else first, name, Skip())
    tokens_BS = tokens()
    hidden_BSH = first(tokens_BS)
    assert hidden_BSH.shape == (2, 16, 32)
    torch.testing.assert_close(second(hidden_BSH), whole(tokens_BS), rtol=0, atol=0)


@pytest.mark.parametrize("kind", WITH_EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_experts_train_in_every_type_and_also_with_odd_widths(kind, dtype):
    odd = {"moe_intermediate_size": 18} if kind != "gpt_oss" else {"intermediate_size": 18}
    for config in (SMALL[kind], SMALL[kind] | odd):
        torch.manual_seed(7)
        model = build_hf({"model_type": kind, **config}).to(dtype)
        loss = F.cross_entropy(model(tokens()).float().flatten(0, 1), tokens().flatten())
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", WITH_EXPERTS)
@pytest.mark.parametrize("type_of_step", [torch.bfloat16, torch.float32], ids=str)
def test_experts_are_multiplied_in_the_type_of_autocast(kind, type_of_step):
    model, seen = small(kind), set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "grouped_mm" in func.overloadpacket.__name__:
                seen.add(args[1].dtype)
            return func(*args, **(kwargs or {}))

    is_narrow = type_of_step != torch.float32
    with Watch(), torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        model(tokens()).float().square().sum().backward()
    assert seen == {type_of_step}
    gradients = [
        p.grad for name, p in model.named_parameters() if "experts." in name and p.ndim > 2
    ]
    assert {each.dtype for each in gradients} == {torch.float32}
    assert all(each.abs().sum() > 0 for each in gradients)


def test_experts_in_float64_and_float32_agree():
    narrow, wide = small("mixtral"), small("mixtral").double()
    # 2 blocks of sums over at most 64 terms of size about 1, in float32.
    torch.testing.assert_close(narrow(tokens()).double(), wide(tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SMALL)
def test_every_family_can_be_traced_without_values(kind):
    with torch.device("meta"):
        model = build_hf({"model_type": kind, **SMALL[kind]})
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        logits_BSV = model(torch.zeros(2, 16, dtype=torch.int64))
        logits_BSV.float().square().mean().backward()
    assert logits_BSV.shape == (2, 16, 300)


def test_a_call_that_fails_leaves_the_model_usable():
    model = small("gpt2")
    hidden_BSH = torch.randn(1, 16, 32)
    with pytest.raises(IndexError):
        model(tokens() + 300)
    with pytest.raises(RuntimeError):
        model(hidden_BSH[..., :31])
    assert model(tokens()).shape == (2, 16, 300)


def test_without_transformers_the_package_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(huggingface.importlib, "import_module", missing)
    with pytest.raises(JobError) as caught:
        build_hf({"model_type": "gpt2", **GPT2})
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix) == ("R010", 'pip install "transformers>=5"')
    assert "a gpt2 model needs transformers" in problem.what


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "t5"}, "cannot build config.json as a causal language model"),
        ({"model_type": "no-such-family"}, "no-such-family"),
        ({"model_type": "llama", **SIZES, "hidden_act": "no-such-act"}, "no-such-act"),
    ],
)
def test_what_transformers_cannot_build_is_refused_in_its_words(config, says):
    with pytest.raises(JobError) as caught:
        build_hf(config)
    (problem,) = caught.value.problems
    assert problem.code == "R013"
    assert says in problem.what
    assert "\n" not in problem.what


def test_only_experts_need_transformers_5_and_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)  # cannot be imported
    with torch.device("meta"):
        build_hf({"model_type": "llama", **SIZES})
        with pytest.raises(JobError, match="which need transformers 5 or newer") as refused:
            build_hf({"model_type": "qwen3_moe", **EXPERTS})
    assert refused.value.problems[0].code == "R010"
