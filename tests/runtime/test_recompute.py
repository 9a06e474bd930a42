from collections import Counter

import pytest
import torch
from tests.runtime.test_shard import decoder, layout_of
from tests.runtime.tiny import SEQ_LEN, SHAPE
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import PlanError
from paceline.runtime.huggingface import build_hf
from paceline.runtime.strategy.compiling import check_compiler, compile_blocks
from paceline.runtime.strategy.recompute import KEPT, recompute_blocks


class Noisy(nn.Module):
    """Blocks with dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()) for _ in range(4)
        )

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def gradients(model, inputs):
    torch.manual_seed(1)
    model(inputs).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


WAYS = [("selective", 1), ("full", 1), ("full", 2)]


@pytest.mark.parametrize(("recompute", "every"), WAYS)
@pytest.mark.parametrize("kind", ["decoder", "dropout"])
def test_recomputed_gradients_are_the_same_bits_under_the_same_names(kind, recompute, every):
    def make():
        torch.manual_seed(0)
        return decoder().float() if kind == "decoder" else Noisy()

    inputs = torch.randint(0, SHAPE.vocab, (2, SEQ_LEN)) if kind == "decoder" else torch.ones(3, 8)
    expected = gradients(make(), inputs)
    layout = layout_of(1, "none", recompute=recompute, recompute_every=every)
    found = gradients(recompute_blocks(make(), layout), inputs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("recompute", "every"), WAYS)
def test_blocks_keep_their_type_and_their_state_its_names(recompute, every):
    plain = decoder()
    layout = layout_of(1, "none", recompute=recompute, recompute_every=every)
    model = recompute_blocks(decoder(), layout)
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_kth_block_of_the_model_is_recomputed(every):
    model = recompute_blocks(Noisy(), layout_of(1, "none", recompute="full", recompute_every=every))
    runs = [0] * 4
    for index, block in enumerate(model.blocks):
        block[0].register_forward_hook(lambda *_, i=index: runs.__setitem__(i, runs[i] + 1))
    model(torch.ones(3, 8)).sum().backward()
    assert runs == [2 if index % every == 0 else 1 for index in range(4)]


def test_nothing_is_recomputed_in_evaluation():
    model = recompute_blocks(Noisy(), layout_of(1, "none", recompute="full")).eval()
    with torch.no_grad():
        assert not model(torch.ones(3, 8)).requires_grad


class Count(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.runs[operation] += 1
        return operation(*args, **(kwargs or {}))


def operations_run(recompute):
    torch.manual_seed(0)
    model = decoder().float()
    recompute_blocks(model, layout_of(1, "none", recompute=recompute))
    with Count() as count:
        model(torch.zeros(2, SEQ_LEN, dtype=torch.long)).sum().backward()
    return count.runs


def test_selective_recompute_runs_no_product_and_no_attention_twice():
    plain, selective, full = (operations_run(each) for each in ("none", "selective", "full"))
    dear = [operation for operation in KEPT if plain[operation]]
    assert dear  # products and attention
    for operation in dear:
        assert selective[operation] == plain[operation] < full[operation]
    silu = torch.ops.aten.silu.default
    assert plain[silu] < selective[silu] == full[silu]


@pytest.mark.filterwarnings("default")  # torch.compile's own
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_give_the_gradients_of_plain_ones(recompute):
    inputs = torch.randint(0, SHAPE.vocab, (2, SEQ_LEN))
    expected = gradients(decoder(), inputs)
    model = recompute_blocks(decoder(), layout_of(1, "none", recompute=recompute))
    found = gradients(compile_blocks(model, backend="aot_eager"), inputs)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_compilation_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    (problem,) = check_compiler("cpu")
    assert problem.code == "R035"
    assert "C++ compiler" in problem.what


def test_a_model_without_blocks_cannot_be_compiled_by_block():
    with pytest.raises(PlanError, match="no list of them"):
        compile_blocks(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch 2.13's compiler looks at it
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_hidden_layers": 12, "num_attention_heads": 2},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 12, "n_head": 2, "n_positions": 64},
    ],
    ids=lambda config: config["model_type"],
)
def test_blocks_of_transformers_share_one_compiled_graph(config):
    """Their blocks know their own number (`layer_idx`), of which the compiler makes no guard; it
    compiles a function eight times at most (`recompile_limit`, torch 2.13)."""
    pytest.importorskip("transformers")
    model = build_hf({"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, **config})
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, device_type="cpu", backend="eager")
    model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


class Hooked(nn.Module):
    """Blocks that do more when they are computed again, as FSDP2's hooks of experts do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.seen = Counter()
        for index, block in enumerate(self.blocks):
            block[1].register_forward_pre_hook(lambda *_, at=index: self.more(at))

    def more(self, index):
        self.seen[index] += 1
        with torch.profiler.record_function("hook"):
            for _ in range(self.seen[index] - 1):
                torch.ones(2).square()

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def test_hooks_may_do_more_when_a_block_is_computed_again():
    torch.manual_seed(0)
    plain, model, inputs = Hooked(), Hooked(), torch.randn(3, 8)
    model.load_state_dict(plain.state_dict())
    recompute_blocks(model, layout_of(1, "none", recompute="selective"))
    wanted = gradients(plain, inputs)
    given = gradients(model, inputs)
    assert all(torch.equal(given[name], one) for name, one in wanted.items())
    assert set(model.seen.values()) == {2}


class WritesOver(Noisy):
    """Blocks that write over the output of their product, in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(2)
        )


def test_an_output_that_is_written_over_is_not_taken_for_what_was_computed():
    model = WritesOver()
    recompute_blocks(model, layout_of(1, "none", recompute="selective"))
    with pytest.raises(RuntimeError, match="written over in place"):
        model(torch.randn(3, 8)).square().sum().backward()
