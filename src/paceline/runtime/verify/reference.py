"""The single device: the same steps on the whole batch at once, in float64 and in the job's type.

The float64 run is the truth that layouts are compared with. The other one shows how far a single
device is from it, by rounding alone.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.job.train_rules import learning_rate_at
from paceline.record.verification import Case, Deviation, Reading, Reference, ReferenceStep
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.sampling import rank_slots, sample_ids
from paceline.runtime.state import named_parameters
from paceline.runtime.strategy import autocast, clip_factor, next_token_loss, ways_of
from paceline.runtime.verify.compare import deviation
from paceline.runtime.verify.model import build_model, has_dropout, job_of, samples, train_spec
from paceline.runtime.verify.watch import Watch

Tensors = dict[str, Tensor]
"""`gradient/3/NAME`, `share/3/1/NAME` (of data rank 1 alone), `parameter/3/NAME`: after step 3."""


@dataclass(frozen=True, slots=True)
class _Trained:
    steps: tuple[ReferenceStep, ...]
    tensors: Tensors


def make_reference(case: Case, device: torch.device) -> tuple[Reference, Tensors]:
    """What every layout must equal, and the tensors to compare with."""
    start = time.perf_counter()
    wide = _train(case, device, precision="fp64", truth=None)
    narrow = _train(case, device, precision=case.precision, truth=wide.tensors)
    model = build_model(case, is_wide=False)
    shapes = {name: tuple(each.shape) for name, each in named_parameters(model).items()}
    reference = Reference(
        wide=wide.steps,
        narrow=narrow.steps,
        shapes=shapes,
        longest_sum=_longest_sum(case, shapes),
        num_chained=_num_chained(wide.steps[0].modules),
        has_dropout=has_dropout(case),
        versions={"torch": str(torch.__version__)},
        seconds=time.perf_counter() - start,
    )
    return reference, wide.tensors


def _train(
    case: Case, device: torch.device, *, precision: str, truth: Mapping[str, Tensor] | None
) -> _Trained:
    is_wide = precision == "fp64"
    model = build_model(case, is_wide=is_wide).to(device)
    train = train_spec(case)
    optimizer = make_optimizer(model, train, ways_of(model))
    alone = replace(case.layout, data=1, tensor=1, pipeline=1, context=1, sharding="none")
    watch, steps = Watch(), []
    tensors: Tensors = {}
    for number in range(1, case.steps + 1):
        rate = learning_rate_at(number, train)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if is_wide:
            _note_shares(case, model, number, device, tensors)
        watch.clear()
        context = nullcontext() if is_wide else autocast(precision, device, alone)  # type: ignore[arg-type]
        with watch.over(model) if is_wide else nullcontext():
            loss = _backward(case, model, number, range(case.layout.global_batch), device, context)
        found = {f"gradient/{number}/{n}": g for n, g in _gradients(model).items()}
        norm = torch.stack([g.double().norm() for g in found.values()]).norm()
        factor = clip_factor(float(norm), train.clip_norm)
        for gradient in found.values():
            gradient.mul_(factor)
        gradients = {n: g.div(factor).clone() for n, g in found.items()}
        optimizer.step()
        optimizer.zero_grad()
        after = {f"parameter/{number}/{n}": p.detach() for n, p in named_parameters(model).items()}
        if truth is None:
            tensors |= gradients | {name: each.clone() for name, each in after.items()}
        steps.append(
            ReferenceStep(
                loss=loss,
                grad_norm=float(norm),
                modules=watch.modules,
                inputs=watch.inputs,
                gradients=_off(gradients, truth),
                parameters=_off(after, truth),
            )
        )
    return _Trained(tuple(steps), tensors)


def _off(found: Tensors, truth: Mapping[str, Tensor] | None) -> dict[str, Deviation]:
    if truth is None:
        return {}
    return {name.split("/", 2)[2]: deviation(each, truth[name]) for name, each in found.items()}


def _backward(
    case: Case,
    model: nn.Module,
    step: int,
    slots: range,
    device: torch.device,
    context: AbstractContextManager[object],
) -> float:
    """Gradients of the samples in some slots, normalised by the whole batch; their loss."""
    ids = sample_ids(
        step - 1,
        slots,
        seed=job_of(case).spec.train.seed,
        global_batch=case.layout.global_batch,
        num_samples=case.num_samples,
    )
    inputs_BS, targets_BS = samples(case, ids)
    total = case.layout.global_batch * case.seq_len
    with context:
        logits_BSV = model(inputs_BS.to(device))
        loss_sum, _ = next_token_loss(logits_BSV, targets_BS.to(device))
    loss = loss_sum / total
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _gradients(model: nn.Module) -> Tensors:
    return {
        name: each.grad for name, each in named_parameters(model).items() if each.grad is not None
    }


def _note_shares(
    case: Case, model: nn.Module, step: int, device: torch.device, tensors: Tensors
) -> None:
    layout = case.layout
    if layout.data == 1:
        return
    for rank in range(layout.data):
        slots = rank_slots(layout, rank)
        whole = range(slots[0].start, slots[-1].stop)
        _backward(case, model, step, whole, device, nullcontext())
        tensors |= {
            f"share/{step}/{rank}/{name}": each.clone() for name, each in _gradients(model).items()
        }
        model.zero_grad()


def _longest_sum(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers that one element adds up, at most: an inner product over a matrix' side, the loss
    over the vocabulary, a gradient over all tokens of the batch."""
    sides = [side for shape in shapes.values() for side in shape]
    return max(*sides, case.vocab, case.layout.global_batch * case.seq_len)


def _num_chained(modules: Mapping[str, Reading]) -> int:
    """Modules without modules inside, forward and backward: each may amplify by a few roundings."""
    names = list(modules)
    leaves = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
    return 2 * max(1, len(leaves))
