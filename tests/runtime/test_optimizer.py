import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.runtime.optimizer import learning_rate_at, make_optimizer
from paceline.spec import TrainSpec

TRAINS = st.builds(
    TrainSpec,
    global_batch=st.just(1),
    steps=st.integers(1, 300),
    warmup_steps=st.integers(0, 400),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    learning_rate=st.floats(1e-6, 10),
    final_learning_rate=st.floats(0, 1),
)


@given(TRAINS)
def test_the_learning_rate_rises_over_the_warm_up_then_only_falls(train):
    rates = [learning_rate_at(step, train) for step in range(1, train.steps + 1)]
    peak = min(max(train.warmup_steps, 1), train.steps) - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    falling = rates[peak:]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(falling))
    assert min(rates) >= 0
    assert max(rates) <= train.learning_rate * (1 + 1e-12)


@given(TRAINS)
def test_the_last_step_has_the_final_learning_rate(train):
    last = learning_rate_at(train.steps, train)
    if train.warmup_steps >= train.steps:
        assert last == pytest.approx(train.learning_rate * train.steps / train.warmup_steps)
    elif train.schedule == "constant":
        assert last == train.learning_rate
    else:
        assert last == pytest.approx(train.learning_rate * train.final_learning_rate, abs=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_decay(name):
    model = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    optimizer = make_optimizer(
        model, TrainSpec(global_batch=1, steps=1, optimizer=name, weight_decay=0.5)
    )
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {name: decays[p] for name, p in model.named_parameters()} == {
        "0.weight": 0.5,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.5,
        "2.bias": 0.0,
    }


def test_frozen_parameters_are_left_to_themselves():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, TrainSpec(global_batch=1, steps=1))
    assert [p for g in optimizer.param_groups for p in g["params"]] == [model.weight]
