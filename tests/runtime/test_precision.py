import pytest
import torch
from tests.runtime.test_shard import layout_of

from paceline.errors import PlanError
from paceline.runtime.strategy.fp8 import product, to_float8, use_float8
from paceline.runtime.strategy.precision import (
    LossScaler,
    autocast,
    check_precision,
    narrow_type,
    set_up_precision,
)

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("precision", "capability", "is_there"),
    [
        ("fp32", None, True),
        ("bf16", None, True),
        ("fp16", None, True),
        ("tf32", None, False),
        ("tf32", TURING, False),
        ("tf32", AMPERE, True),
        ("fp8", None, False),
        ("fp8", AMPERE, False),
        ("fp8", HOPPER, True),
    ],
)
def test_a_precision_that_the_hardware_lacks_is_refused_with_what_it_needs(
    precision, capability, is_there
):
    device_type = "cpu" if capability is None else "cuda"
    problems = list(check_precision(precision, layout_of(2, "full"), device_type, capability))
    assert not problems if is_there else [each.code for each in problems] == ["R034"]
    assert all("compute capability" in each.what for each in problems)


def test_float8_is_not_split_over_tensor_ranks():
    (problem,) = check_precision("fp8", layout_of(2, "none", tensor=2), "cuda", HOPPER)
    assert "tensor ranks" in problem.what


def test_tf32_is_what_float32_products_may_round_to():
    try:
        set_up_precision("tf32")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        set_up_precision("fp32")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_whole_parameters_are_autocast_and_sharded_ones_cast_themselves(precision):
    product = torch.nn.Linear(4, 4)
    with autocast(precision, "cpu", layout_of(2, "none")):
        assert product(torch.ones(1, 4)).dtype == (narrow_type(precision) or torch.float32)
    with autocast(precision, "cpu", layout_of(2, "full")):
        assert product(torch.ones(1, 4)).dtype == torch.float32


def test_the_scale_is_halved_after_an_overflow_and_doubled_after_enough_good_steps():
    scaler = LossScaler(initial=8.0, patience=2)
    scales = []
    for found_inf in (True, False, False, False, True, False, False):
        scaler.update(found_inf=found_inf)
        scales.append(scaler.factor)
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 8.0]


def test_a_scaled_loss_keeps_gradients_that_fp16_would_lose():
    weight = torch.ones(1, requires_grad=True)
    (weight.half() * 2e-8).sum().float().backward()
    assert float(weight.grad) == 0.0  # below 6e-8 / 2
    weight.grad = None
    scaler = LossScaler(initial=2.0**12)
    ((weight.half() * 2e-8).sum().float() * scaler.factor).backward()
    assert float(weight.grad / scaler.factor) == pytest.approx(2e-8, rel=2**-10)


def test_a_scaler_goes_on_as_saved():
    scaler = LossScaler(patience=3)
    for found_inf in (True, False, False):
        scaler.update(found_inf=found_inf)
    resumed = LossScaler(patience=3)
    resumed.load_state_dict(scaler.state_dict())
    for each in (scaler, resumed):
        each.update(found_inf=False)
    assert resumed.factor == scaler.factor == 2.0**16


E4M3 = 2**-4
"""Relative rounding error of a float8 number: 3 bits of mantissa and the implied one."""


def test_float8_products_are_as_near_as_their_rounding():
    left, right = torch.randn(32, 64), torch.randn(48, 64)
    error = product(left, right) - left @ right.T
    # Both factors of each term are rounded; errors of different terms are independent.
    lengths = left.norm(dim=1, keepdim=True) * right.norm(dim=1)
    assert (error.abs() / lengths).max() < 2 * E4M3


def test_rows_of_any_size_and_of_zeros_fit_into_float8():
    rows = torch.tensor([[1e-20, 2e-20], [0.0, 0.0], [1e20, -3e20]])
    narrow, scale = to_float8(rows)
    assert torch.isfinite(narrow.float()).all()
    torch.testing.assert_close(narrow.float() * scale, rows, rtol=E4M3, atol=0)


def test_the_blocks_linears_train_in_float8_and_what_does_not_fit_stays():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
            self.head = torch.nn.Linear(32, 3)

        def forward(self, inputs):
            for block in self.blocks:
                inputs = torch.tanh(block(inputs))
            return self.head(inputs)

    torch.manual_seed(0)
    model, inputs = Net(), torch.randn(2, 8, 32)
    expected = model(inputs)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    assert use_float8(model) is None
    found = model(inputs)
    found.square().sum().backward()
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 2 * E4M3 * expected.norm()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() < 4 * E4M3 * gradient.norm()


class Mixed(torch.nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, width) for width in widths)


def test_linears_that_stay_in_bf16_are_told_and_none_in_float8_is_refused():
    told = use_float8(Mixed(32, 24))
    assert told is not None
    assert "1 of 2 linears stay bf16" in told
    assert told.endswith("the first is blocks 1, itself: 32 to 24")
    with pytest.raises(PlanError, match="none of the 2 linears"):
        use_float8(Mixed(24, 24))
