"""Preference tuning (DPO): pairs of answers, what the reference gives them, and the loss.

The reference is the model as it is before the first step: the pretrained weights, with adapters
that add nothing yet. It never changes, so its log-probabilities are computed once, in the run's own
layout, and kept in the run's folder: a resumed run reads the same numbers.

Letters in tensor names: B pairs in a micro-batch, S tokens in a sample, T = S + 2, N pairs of the
data, training ones first.

Source: Rafailov et al., arXiv:2305.18290, equation 7.
"""

import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.control.slots import Phase
from paceline.errors import RunError
from paceline.record import events as log
from paceline.record.lines import write_whole
from paceline.record.run import training_digest
from paceline.runtime import strategy
from paceline.runtime.checkpoint._all_ranks import from_first
from paceline.runtime.data import PreparedData, Samples
from paceline.runtime.sampling import Ids, Mixture, sample_ids
from paceline.runtime.session import Session

Batches = Callable[[Samples, Ids], Iterator[strategy.Batch]]
"""Samples and ids -> this rank's micro-batches of them, on its device."""

_GROUP = 4096
"""Pairs whose log-probabilities are computed in one call: a pipeline holds a call's micro-batches
all at once. A guess."""

_SIGN_OF_LIFE_S = 300.0
"""Between two signs that the reference is still being computed. A guess: far below what a phase may
take before it is called late (`UNKNOWN_S` in control/adaptive_timeouts.py), and too long to make
the limit learned from it a short one."""


@dataclass(frozen=True)
class Pairs:
    """Samples of pairs. Two columns of the targets say where the rejected answer begins, and which
    pair it is."""

    data: PreparedData
    first: int

    @property
    def num_samples(self) -> int:
        return self.data.num_samples

    @property
    def order(self) -> int | Mixture:
        return self.data.order

    @property
    def sources(self) -> dict[str, range]:
        return self.data.sources

    @property
    def targets_per_sample(self) -> float:
        """A pair counts once, however long its answers are."""
        return 1.0

    def samples(self, ids: Sequence[int] | NDArray[np.int64]) -> strategy.Batch:
        """`(inputs_BS, targets_BT, ends_BE)` of these pairs in this order."""
        inputs_BS, targets_BS, *ends = self.data.samples(ids)
        rows_B = torch.as_tensor(np.asarray(ids, np.int64)) + self.first
        columns_B2 = torch.stack([ends[0][:, 0].long(), rows_B], dim=1)
        return inputs_BS, torch.cat([targets_BS, columns_B2], dim=1), ends[0]


def log_probabilities(logits_BSV: Tensor, targets_BT: Tensor) -> Tensor:
    """`sums_B2`: the log-probability of each pair's chosen and rejected answer, summed over their
    tokens in float32. Also of logits that are split over the vocabulary."""
    targets_BS, place_B = targets_BT[:, :-2], targets_BT[:, -2]
    wide = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    losses = F.cross_entropy(
        wide.flatten(0, 1),
        targets_BS.flatten(),
        reduction="none",
        ignore_index=strategy.IGNORED,
    )
    local = losses.to_local() if isinstance(losses, DTensor) else losses
    each_BS = -local.view(targets_BS.shape)
    is_chosen_BS = torch.arange(targets_BS.shape[1], device=place_B.device) < place_B[:, None]
    return torch.stack([(each_BS * is_chosen_BS).sum(1), (each_BS * ~is_chosen_BS).sum(1)], dim=1)


class PreferenceLoss:
    """The sum of the pairs' losses, how many pairs they are, and in how many the margin is right.

    A pair's margin is how much more likely the model makes the chosen answer than the rejected one,
    minus the same of the reference; its loss is -log sigmoid(beta x margin).
    """

    def __init__(self, beta: float, reference_N2: Tensor) -> None:
        self._beta = beta
        self._reference_N2 = reference_N2

    def __call__(self, logits_BSV: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        rows_B = targets_BT[:, -1]
        counts_B = rows_B >= 0
        moved_B2 = log_probabilities(logits_BSV, targets_BT)
        moved_B2 = moved_B2 - self._reference_N2[rows_B.clamp(min=0)]
        margins_B = moved_B2[:, 0] - moved_B2[:, 1]
        losses_B = -F.logsigmoid(self._beta * margins_B)
        loss_sum = losses_B.where(counts_B, 0.0).sum()
        num_pairs = counts_B.sum()
        return loss_sum, num_pairs, ((margins_B > 0) & counts_B).sum(), num_pairs


class _Recorder:
    """A loss that keeps each pair's log-probabilities."""

    def __init__(self, num_pairs: int, device: torch.device) -> None:
        self.sums_N2 = torch.zeros(num_pairs, 2, dtype=torch.float64, device=device)

    def __call__(self, logits_BSV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        sums_B2, rows_B = log_probabilities(logits_BSV, targets_BT), targets_BT[:, -1]
        counts_B = rows_B >= 0
        self.sums_N2[rows_B[counts_B]] = sums_B2[counts_B].double()
        return sums_B2.sum(), counts_B.sum()


def reference_of(
    session: Session,
    model: nn.Module,
    batches: Batches,
    train: Pairs,
    held_out: Mapping[str, Ids],
    held_out_pairs: Pairs | None,
) -> Tensor:
    """`reference_N2`: log-probabilities of the pairs that the run reads, by the model as it is
    before its first step. Others are NaN. Collective.

    Raises:
        RunError: `R068`, the numbers of a run that has taken steps are gone.
    """
    path = _path(session)
    num_pairs = train.num_samples + (held_out_pairs.num_samples if held_out_pairs else 0)
    known_N2 = from_first(_read(path, num_pairs) if session.is_first else _unknown(0), None)
    wanted = session.keep("pairs that are read", lambda: _trained_ids(session, train))
    missing = [(train, wanted[np.isnan(known_N2[wanted, 0])])]
    if held_out_pairs is not None:
        ids = np.concatenate([np.zeros(0, np.int64), *held_out.values()])
        rows = ids + held_out_pairs.first
        missing.append((held_out_pairs, np.unique(ids[np.isnan(known_N2[rows, 0])])))
    count = sum(len(ids) for _, ids in missing)
    if count:
        if session.held.is_anywhere:
            raise _is_gone(path)
        start = time.perf_counter()
        found_N2 = _compute(session, model, batches, missing, num_pairs)
        for pairs, ids in missing:
            known_N2[ids + pairs.first] = found_N2[ids + pairs.first]
        if session.is_first:
            content = io.BytesIO()
            np.save(content, known_N2)
            write_whole(path, content.getvalue())
        seconds = time.perf_counter() - start
        text = f"the reference's log-probabilities of {count} pairs took {seconds:.1f} s"
        session.report(log.Noted(text=text))
    return torch.from_numpy(known_N2).to(session.place.device)


def _compute(
    session: Session,
    model: nn.Module,
    batches: Batches,
    missing: Iterable[tuple[Pairs, Ids]],
    num_pairs: int,
) -> NDArray[np.float64]:
    recorder = _Recorder(num_pairs, session.place.device)
    model.eval()
    alive_s = time.monotonic()
    for pairs, ids in missing:
        for start in range(0, len(ids), _GROUP):
            if time.monotonic() - alive_s > _SIGN_OF_LIFE_S:
                alive_s = time.monotonic()
                session.progress.enter(Phase.BUILDING, start)
            strategy.evaluate(
                model,
                session.meshes,
                batches(pairs, ids[start : start + _GROUP]),
                precision=session.precision,
                loss_of=recorder,
            )
    model.train()
    if not session.meshes.counts_loss:
        recorder.sums_N2.zero_()
    if dist.is_initialized():
        dist.all_reduce(recorder.sums_N2)
    found: NDArray[np.float64] = recorder.sums_N2.cpu().numpy()
    session.member.settle(session.place.device)
    return found


def _trained_ids(session: Session, train: Pairs) -> Ids:
    spec = session.job.spec.train
    if isinstance(train.order, int) and spec.steps * spec.global_batch >= train.num_samples:
        return np.arange(train.num_samples)
    drawn = [
        sample_ids(
            step,
            range(spec.global_batch),
            seed=spec.seed,
            global_batch=spec.global_batch,
            num_samples=train.order,
        )
        for step in range(spec.steps)
    ]
    return np.unique(np.concatenate(drawn))


def _path(session: Session) -> Path:
    """Named by what the numbers follow from: the data and the first weights."""
    info = session.run.info()
    key = f"{info.data_fingerprint} {info.weights_digest} {training_digest(session.job)}"
    return session.run.path / f"reference-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"


def _read(path: Path, num_pairs: int) -> NDArray[np.float64]:
    try:
        found: NDArray[np.float64] = np.load(path)
    except FileNotFoundError:
        return _unknown(num_pairs)
    return found


def _unknown(num_pairs: int) -> NDArray[np.float64]:
    return np.full((num_pairs, 2), np.nan)


def _is_gone(path: Path) -> RunError:
    return RunError.of(
        code="R068",
        what="the reference's log-probabilities are gone, and no rank has the weights from before "
        "the first step any more",
        where=str(path),
        fix="resume the run: `paceline run --resume`, which reads the weights anew",
    )
