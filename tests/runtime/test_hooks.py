import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.test_shard import alone, decoder, layout_of, named, train
from torch import nn

from paceline.parallel.layout_laws import check_compression
from paceline.runtime.strategy.data.hooks import Compression
from paceline.runtime.strategy.data.shard import set_gradient_sync, shard
from paceline.runtime.strategy.mesh import make_meshes

SMALL = 4096
"""Bytes of a bucket: the tiny decoder then has several."""


HOOKS = {
    "bf16": Compression(kind="bf16"),
    "fp16": Compression(kind="fp16"),
    "powersgd, not started": Compression(kind="powersgd"),
    "powersgd": Compression(kind="powersgd", start_step=0, rank=2),
}
CASES = [(name, bucket_bytes) for name in HOOKS for bucket_bytes in (None, SMALL)]


def train_compressed(rank, world):
    """By case: each gradient's error as a share of its norm; and the parameters after."""
    expected, _ = alone()
    results = {}
    for name, bucket_bytes in CASES:
        layout = layout_of(world, "none")
        meshes = make_meshes(layout, "cpu")
        model = shard(
            decoder(), layout, meshes, "fp32", hook=HOOKS[name], bucket_bytes=bucket_bytes
        )
        found, parameters = train(model, layout, rank)
        errors = {n: float((found[n] - g).norm() / g.norm()) for n, g in expected.items()}
        results[name, bucket_bytes] = errors, {n: float(p.sum()) for n, p in parameters.items()}
    return results


@pytest.fixture(scope="module")
def compressed():
    first, second = run_ranks(train_compressed, 2)
    assert first == second  # replicas stay the same
    return {case: errors for case, (errors, _) in first.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("bucket_bytes", [None, SMALL])
@pytest.mark.parametrize(("kind", "rounding"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_narrow_hooks_give_sums_that_are_rounded_and_no_more(
    kind, rounding, bucket_bytes, compressed
):
    # Each rank's share is rounded, and the sum: three roundings of numbers at most about twice it.
    errors = compressed[kind, bucket_bytes].values()
    assert all(0 < error < 6 * rounding for error in errors)


@pytest.mark.ranks
@pytest.mark.parametrize("bucket_bytes", [None, SMALL])
def test_powersgd_is_exact_before_it_starts(bucket_bytes, compressed):
    assert max(compressed["powersgd, not started", bucket_bytes].values()) < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize("bucket_bytes", [None, SMALL])
def test_powersgd_approximates_matrices_and_sums_the_rest_exactly(bucket_bytes, compressed):
    errors = compressed["powersgd", bucket_bytes]
    assert all(error < 1e-12 for name, error in errors.items() if "norm" in name)
    # What is sent is the sum's projection on fewer directions: its error is less than the sum.
    assert 1e-3 < errors["blocks.0.ffn.up.weight"] < 1


def constant_gradient(rank, world):
    """What PowerSGD has sent after 1, 20 and 400 steps, when the gradient is always the same."""
    layout = layout_of(world, "none", accumulation=1)
    torch.manual_seed(0)
    model = nn.Linear(24, 24, bias=False).double()
    hook = Compression(kind="powersgd", start_step=0, rank=1)
    model = shard(model, layout, make_meshes(layout, "cpu"), "fp32", hook=hook)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 24, generator=generator, dtype=torch.float64)
    weights = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    expected = weights @ inputs.T @ inputs
    torch.distributed.all_reduce(expected)
    sent = torch.zeros_like(expected)
    errors = []
    for step in range(1, 401):
        model.zero_grad()
        set_gradient_sync(model, layout, is_last=True)
        ((model(inputs) @ weights) * inputs).sum().backward()
        sent += named(model)["weight"].grad
        if step in (1, 20, 400):
            errors.append(float((sent / step - expected).norm() / expected.norm()))
    return errors


@pytest.mark.ranks
def test_what_powersgd_leaves_out_is_sent_in_later_steps():
    for first, later, last in run_ranks(constant_gradient, 2):
        assert first > later > last
        # The error carried over stays bounded, so the mean of what was sent converges like 1 / n.
        assert last < later / 10


def recover_from_infinity(rank, world):
    layout = layout_of(world, "none", accumulation=1)
    hook = Compression(kind="powersgd", start_step=0, rank=1)
    torch.manual_seed(0)
    model = shard(nn.Linear(24, 24), layout, make_meshes(layout, "cpu"), "fp32", hook=hook)
    norms = []
    for value in (1.0, float("inf"), 1.0):
        model.zero_grad()
        set_gradient_sync(model, layout, is_last=True)
        model(torch.full((1, 24), value)).sum().backward()
        norms.append(float(named(model)["weight"].grad.norm()))
    return norms


@pytest.mark.ranks
def test_powersgd_forgets_a_step_that_was_not_finite():
    for before, infinite, after in run_ranks(recover_from_infinity, 2):
        assert not torch.isfinite(torch.tensor(infinite))
        assert after == pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "is_plain", "kind"),
    [({"sharding": "full"}, True, "bf16"), ({"sharding": "none"}, False, "powersgd")],
)
def test_compression_that_is_not_there_is_refused(options, is_plain, kind):
    (problem,) = check_compression(layout_of(2, **options), kind, is_plain=is_plain)
    assert problem.code == "L024"
    assert problem.where == "train.gradient_compression"


def test_powersgd_in_fp16_is_refused_because_its_errors_are_scaled():
    layout, hook = layout_of(2, "none"), Compression(kind="powersgd")
    (problem,) = check_compression(layout, hook.kind, "fp16")
    assert "loss scale" in problem.what
    assert list(check_compression(layout, hook.kind, "bf16")) == []
