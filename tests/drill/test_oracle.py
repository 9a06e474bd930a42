"""The oracle and the ledger: what is right passes, and every kind of wrong is caught."""

import random

import pytest
from tests.drill.made import (
    WANTED,
    drilled,
    finished,
    injected,
    line,
    lost,
    recovered,
)

from paceline.check.drill.ledger import audit, order_in, pure_digest
from paceline.check.drill.oracle import Reference, judge
from paceline.check.drill.schedule import random_schedule
from paceline.job.fault_grammar import KINDS, MATRIX, parse_fault
from paceline.prepare import Index, Prepared, SourceIndex
from paceline.prepare.index import write_index
from paceline.record import events as log
from paceline.runtime.sampling import Mixture, batch_digest

KILL = "kill rank=1 step=6"
SAME = Reference(digest="same")


def failed(verdict) -> list[str]:
    return [check.name for check in verdict.checks if check.ok is False]


def test_s4_15_a_recovered_run_with_the_same_end_passes():
    run = drilled(injected(KILL), lost("killed by SIGKILL"), recovered())
    verdict = judge(run, SAME)
    assert verdict.is_right, verdict.checks
    (outcome,) = verdict.outcomes
    assert outcome.recovered is not None
    assert outcome.is_right


@pytest.mark.parametrize(
    ("weights", "order"),
    [((None, None), 8), ((3.0, 1.0), Mixture(sizes=(3, 5), weights=(3.0, 1.0)))],
)
def test_the_ledger_of_prepared_data_is_of_their_mixture(tmp_path, weights, order):
    counts = {"documents": 1, "tokens": 1, "targets": 1, "source_files": {}}
    sources = [
        SourceIndex(name=name, folder=name, weight=weight, samples=samples, **counts)
        for name, weight, samples in zip("ab", weights, (3, 5), strict=True)
    ]
    index = {"tokenizer": "t", "vocab": 9, "eos": None, "seq_len": 4, "pack": "windows"}
    index |= {"dtype": "uint16", "held_out": (), "settings": {}, "versions": {}}
    write_index(tmp_path, Index(train=tuple(sources), **index))
    found = order_in(Prepared(tmp_path), 4)
    assert found == order
    expected = batch_digest(6, seed=1, global_batch=4, num_samples=order)
    assert pure_digest(1, 4, found)(7) == expected


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (drilled(), "faults"),
        (drilled(injected(KILL), lost("exited with 1"), recovered()), "verdicts"),
        (drilled(injected(KILL), lost("killed by SIGKILL", rank=0), recovered()), "verdicts"),
        (drilled(injected(KILL), lost("killed by SIGKILL"), recovered(steps_lost=2)), "steps lost"),
        (drilled(injected(KILL), lost("killed by SIGKILL"), recovered(downtime_s=9.0)), "times"),
        (
            drilled(injected(KILL), lost("killed by SIGKILL"), recovered(), left=["x"]),
            "left behind",
        ),
        (
            drilled(injected(KILL), lost("killed by SIGKILL"), recovered(), finished("other")),
            "state",
        ),
        (
            drilled(injected(KILL), lost("killed by SIGKILL"), finished(None, "failed", "why")),
            "end",
        ),
    ],
)
def test_s4_15_what_is_wrong_with_a_run_is_named(run, name):
    assert name in failed(judge(run, SAME))


def test_steps_may_be_lost_when_every_replica_is():
    both = "kill rank=0+1 step=6"
    run = drilled(
        injected(both, rank=0),
        injected(both, rank=1),
        lost("killed by SIGKILL", rank=0),
        lost("killed by SIGKILL", rank=1),
        recovered(steps_lost=2),
        faults=(both,),
    )
    verdict = judge(run, SAME)
    assert verdict.is_right, verdict.checks
    assert verdict.steps_lost == 2


def test_a_false_alarm_is_caught():
    long = "long rank=1 step=6 for=2s"
    assert judge(drilled(injected(long), faults=(long,)), SAME).is_right
    alarmed = drilled(injected(long), lost("looping"), recovered(), faults=(long,))
    assert failed(judge(alarmed, SAME)) == ["verdicts"]


@pytest.mark.parametrize(
    ("ranks", "suspects", "is_right", "says"),
    [
        ([1], [], True, "replay, healed from checkpoint"),
        ([0], [], False, "replay, healed from checkpoint"),
        ([], [0, 1], None, "undecided between ranks 0 and 1, healed from checkpoint; "),
        ([], [2, 3], False, "undecided, healed from checkpoint"),
    ],
)
def test_s1_19_replicas_of_which_nobody_can_say_which_is_wrong_are_undecided_and_no_wrong_name(
    ranks, suspects, is_right, says
):
    flip = "flip rank=1 step=6"
    seen = log.CorruptionFound(
        step=6,
        ranks=ranks,
        suspects=suspects,
        tensors=["w"],
        verdict="undecided" if suspects else "replay",
        healed="checkpoint",
        goes_on_after=4,
    )
    (outcome,) = judge(drilled(injected(flip), seen, faults=(flip,)), SAME).outcomes
    assert outcome.is_right is is_right
    assert outcome.verdict.startswith(says)


def test_a_poisoned_sample_must_be_named_in_the_reason():
    poison = "poison sample=3"
    end = finished(None, "failed", "rank 1: InjectedError; sample ids 2, 3")
    assert judge(drilled(injected(poison), end, faults=(poison,)), SAME).is_right
    vague = finished(None, "failed", "rank 1: InjectedError")
    assert "verdicts" in failed(judge(drilled(injected(poison), vague, faults=(poison,)), SAME))


def test_a_difference_between_is_told_with_the_first_step_it_is_seen_at():
    lines = [line(step) for step in range(1, 21)]
    lines[9] = line(10)
    object.__setattr__(lines[9], "state_digest", "other")
    run = drilled(injected(KILL), lost("killed by SIGKILL"), recovered(), lines=lines)
    verdict = judge(run, Reference(digest="same", digests={10: "same"}))
    (state,) = (check for check in verdict.checks if check.name == "state")
    assert state.ok is False
    assert "first seen after step 10" in state.says


OOM = "oom rank=1 step=6"


def refitted(exactness="numeric", tolerance=1e-6, last_loss=1.0):
    """A run that its record says is `exactness`, whose last step's loss is given."""
    lines = [*(line(step) for step in range(1, 6)), *(line(step, 2) for step in range(6, 21))]
    object.__setattr__(lines[-1], "loss", last_loss)
    changed = log.ExactnessChanged(
        at=6.2,
        generation=2,
        exactness=exactness,
        reason="layout.micro_batch was 6 and is 3",
        tolerance=tolerance,
    )
    told = (injected(OOM), lost("out of memory: MemoryError: "), changed, recovered())
    return drilled(*told, finished("other"), faults=(OOM,), lines=lines)


@pytest.mark.parametrize(
    ("run", "ok", "says"),
    [
        (refitted(), True, "equal to rounding, not to the bit (numeric: layout.micro_batch was 6"),
        (refitted(last_loss=1 + 9e-6), True, "differs by at most 9e-06"),
        (refitted(last_loss=1 + 9e-5), False, "differs by 9e-05 after step 20, not by rounding"),
        (refitted(last_loss=None), False, "after step 20"),
        (refitted("different", None), None, "not compared: the run's record promises `different`"),
    ],
)
def test_s0_13_a_run_whose_record_promises_rounding_is_held_to_its_losses(run, ok, says):
    calm = Reference(digest="same", losses=dict.fromkeys(range(1, 21), 1.0))
    verdict = judge(run, calm)
    (state,) = (check for check in verdict.checks if check.name == "state")
    assert (state.ok, says in state.says) == (ok, True), state.says
    assert verdict.is_right == (ok is not False), verdict.checks


GOOD = [*(line(step) for step in range(1, 8)), *(line(step, 2) for step in range(8, 21))]


def complaints(lines) -> list[str]:
    return audit(lines, num_steps=20, first_steps={1: 1, 2: 8}, digest_of=WANTED.get)


def test_a_ledger_with_every_step_once_is_right():
    assert complaints(GOOD) == []


@pytest.mark.parametrize("seed", range(200))
def test_every_mutation_of_a_ledger_is_caught(seed):
    draw = random.Random(seed)
    lines = list(GOOD)
    place = draw.randrange(len(lines))
    mutation = draw.choice(["drop", "repeat", "other samples", "swap", "beyond", "again"])
    if mutation == "drop":
        del lines[place]
    elif mutation == "repeat":
        lines.insert(place, lines[place])
    elif mutation == "other samples":
        lines[place] = line(lines[place].step, lines[place].generation, samples="others")
    elif mutation == "swap":
        other = (place + 1) % len(lines)
        first, second = lines[place], lines[other]
        lines[place] = line(first.step, first.generation, samples=second.samples_digest)
    elif mutation == "beyond":
        lines.append(line(20, 2))
        object.__setattr__(lines[-1], "step", 21)
    else:
        lines.append(line(draw.randint(1, 7), 2))
    assert complaints(lines), mutation


def test_steps_done_again_after_going_back_are_no_complaint():
    lines = [*(line(step) for step in range(1, 10)), *(line(step, 2) for step in range(8, 21))]
    assert complaints(lines) == []


def test_steps_done_again_after_a_wrong_state_are_no_complaint():
    lines = [*(line(step) for step in range(1, 8)), *(line(step) for step in range(5, 21))]
    facts = {"num_steps": 20, "first_steps": {1: 1}, "digest_of": WANTED.get}
    assert audit(lines, gone_back=[(1, 4)], **facts) == []
    assert audit(lines, gone_back=[(1, 5)], **facts)
    assert audit(lines, **facts)


def test_the_pure_digest_is_that_of_the_step_itself():
    digest_of = pure_digest(seed=3, global_batch=8, num_samples=50)
    assert digest_of(5) == batch_digest(4, seed=3, global_batch=8, num_samples=50)


def test_a_schedule_is_the_same_every_time_and_keeps_to_its_bounds():
    asked = {"num_faults": 4, "num_ranks": 4, "first_step": 2, "last_step": 10}
    for seed in range(100):
        texts = random_schedule(seed, **asked)
        assert texts == random_schedule(seed, **asked)
        faults = [parse_fault(text) for text in texts]
        assert len(faults) == 4
        assert all(2 <= fault.step <= 10 and fault.ranks[0] < 4 for fault in faults)
        assert not faults[0].in_recovery


def test_s4_15_every_row_of_the_matrix_is_drilled_or_says_where_or_why_not():
    assert [row.number for row in MATRIX] == list(range(1, 37))
    for row in MATRIX:
        assert row.faults or row.elsewhere or row.skipped, row.title
        for text in row.faults:
            parse_fault(text)


def test_every_kind_stands_for_a_row():
    used = {text.split()[0] for row in MATRIX for text in row.faults}
    assert set(KINDS) - used == {"full-disk"}
