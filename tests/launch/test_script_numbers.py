"""Output of scripts, piece by piece, to lines of metrics and events."""

from pathlib import Path

import pytest

from paceline.launch.script_numbers import STEPS_EVERY_S, Found, Lines, Numbers
from paceline.record import events as log
from paceline.record.metrics import MetricsLog, StepMetrics, read_metrics


def read(text: str, *, rank: int = 0, num_ranks: int = 2, piece: int = 7) -> list[Found]:
    """What a log says, arriving in pieces that cut through lines and letters."""
    numbers = Numbers(generation=1, num_ranks=num_ranks)
    content = text.encode()
    found: list[Found] = []
    for at in range(0, len(content), piece):
        found += numbers.feed(rank, content[at : at + piece], at=float(at))[0]
    return found + numbers.end(rank, at=float(len(content)))


def steps(found: list[Found]) -> list[tuple[int, float | None]]:
    newest = {line.step: line.loss for line in found if isinstance(line, StepMetrics)}
    return list(newest.items())


TRAINER = (
    "\r  0%|          | 0/6 [00:00<?, ?it/s]"
    "\r 33%|███▎      | 2/6 [00:00<00:00, 11.0it/s]"
    "\r                                            \r"
    "{'loss': '2.3', 'grad_norm': '1.1', 'learning_rate': '5e-05', 'epoch': '1'}\n"
    "\r 50%|█████     | 3/6 [00:00<00:00, 11.0it/s]"
    "\n\r  0%|          | 0/2 [00:00<?, ?it/s]\x1b[A"
    "\n\r100%|██████████| 2/2 [00:00<00:00, 90it/s]\x1b[A"
    "\r                                            \r"
    "{'eval_loss': '2.1', 'eval_runtime': '0.5', 'epoch': '1'}\n"
    "\r 50%|█████     | 3/6 [00:01<00:00, 11.0it/s]"
    "\r100%|██████████| 6/6 [00:01<00:00, 11.0it/s]"
    "\r{'loss': '1.9', 'learning_rate': '0', 'epoch': '2'}\n"
    "\r100%|██████████| 6/6 [00:01<00:00, 11.0it/s]"
    "\r{'eval_loss': '2.1', 'eval_runtime': '0.5', 'epoch': '2'}\n"
    "\r100%|██████████| 6/6 [00:01<00:00, 11.0it/s]"
    "\r{'train_runtime': '1.1', 'train_loss': '2.1', 'epoch': '2'}\n"
)
"""What transformers 5.23's Trainer prints without a terminal; the bar after a line has its step."""


def test_an_epochs_summary_is_no_step_where_other_lines_name_steps():
    text = "".join(
        f"step {10 * epoch + 5}: loss 2.{epoch}\n"
        f"Epoch {epoch + 1}/3 done - avg loss: 3.6 - val_loss: 3.{epoch}\n"
        for epoch in range(3)
    )
    found = read(text)
    assert steps(found) == [(5, 2.0), (15, 2.1), (25, 2.2)]
    evaluated = [(each.step, each.loss) for each in found if isinstance(each, log.Evaluated)]
    assert evaluated == [(5, 3.0), (15, 3.1), (25, 3.2)]


@pytest.mark.parametrize(
    ("word", "is_known_at_once"), [("Batch", True), ("Step", False)], ids=["batch", "step"]
)
def test_steps_that_begin_anew_in_every_epoch_are_counted_on(word, is_known_at_once):
    text = "".join(
        f"[Epoch {epoch}/3, {word} {batch}/2] loss: {epoch}.{batch}\n"
        for epoch in (1, 2, 3)
        for batch in (1, 2)
    )
    found = [line for line in read(text) if isinstance(line, StepMetrics)]
    assert [line.step for line in found] == [1, 2, 3, 4, 5, 6]
    assert found[0].num_steps == (6 if is_known_at_once else None)
    assert found[-1].num_steps == 6


def test_steps_that_go_on_over_epochs_stay_what_they_are():
    text = "Epoch 1/2 step 1/4 loss: 1.5\nEpoch 2/2 step 3/4 loss: 1.4\n"
    found = [line for line in read(text) if isinstance(line, StepMetrics)]
    assert [(line.step, line.num_steps) for line in found] == [(1, None), (3, 4)]


def test_a_step_takes_as_long_as_its_bar_says_though_tqdm_ends_no_picture_before_the_next():
    numbers = Numbers(generation=1, num_ranks=1)
    found: list[Found] = []
    for step in range(1, 11):
        bar = f"\r {10 * step}%|##| {step}/10 [00:0{step}<00:01,  1.00s/it]"
        loss = f"\r{' ' * 40}\r{{'loss': '2.5'}}\n{bar}" if step % 5 == 0 else ""
        found += numbers.feed(0, (bar + loss).encode(), at=100.0 + 2 * step)[0]
    lines = [line for line in found if isinstance(line, StepMetrics) and line.loss is not None]
    assert [line.step for line in lines] == [5, 10]
    assert [line.step_s for line in lines] == pytest.approx([2.0, 2.0], rel=0.05)


def test_the_loss_before_the_first_step_is_kept():
    assert steps(read("iter 0: loss 10.5\niter 1: loss 9.5\n")) == [(0, 10.5), (1, 9.5)]


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_the_trainers_numbers_have_the_step_of_the_bar_that_follows(piece):
    found = read(TRAINER, piece=piece)
    assert [pair for pair in steps(found) if pair[1] is not None] == [(3, 2.3), (6, 1.9)]
    evaluated = [each for each in found if isinstance(each, log.Evaluated)]
    assert [(each.step, each.loss, each.seconds) for each in evaluated] == [
        (3, 2.1, 0.5),
        (6, 2.1, 0.5),
    ]
    assert all(each.step > 0 for each in found)
    last = [each for each in found if isinstance(each, StepMetrics)][-1]
    assert (last.num_steps, last.logged["epoch"]) == (6, 2.0)


def test_lightnings_epochs_add_up_and_its_evaluation_is_told_once():
    bar = "\rEpoch {}: {:3}%|███| {}/4 [00:00<00:00, 9.00it/s, v_num=0, train_loss={}{}]"
    text = "\rSanity Checking DataLoader 0: 100%|███| 2/2 [00:00<00:00, 9.00it/s]"
    for epoch in range(2):
        for batch in range(1, 5):
            text += bar.format(epoch, 25 * batch, batch, 3 - epoch, ", val_loss=2.5" * epoch)
        text += "\rValidation DataLoader 0: 100%|███| 2/2 [00:00<00:00, 9.00it/s]"
    found = read(text + "\n")
    assert steps(found) == [(step, 3.0 if step <= 4 else 2.0) for step in range(1, 9)]
    assert [each.loss for each in found if isinstance(each, log.Evaluated)] == [2.5]


def test_a_bar_of_each_epoch_adds_up():
    text = "".join(
        f"\r{50 * n}%|███| {n}/2 [00:00<00:00, 9.00it/s, loss=1.5]" for _ in "ab" for n in (1, 2)
    )
    assert [step for step, _ in steps(read(text))] == [1, 2, 3, 4]


def test_bars_of_other_things_are_not_steps():
    text = "\rMap: 100%|███| 900/900 [00:00<00:00, 9 examples/s]\n"
    text += "\rGenerating train split: 100%|███| 900/900 [00:00<00:00, 9 examples/s]\n"
    text += "\r100%|███| 50/50 [00:00<00:00, 9.00it/s]\n"  # files, say
    text += "\r 10%|███| 1/10 [00:00<00:00, 9.00it/s, loss=3.0]\n"
    assert steps(read(text))[-1] == (1, 3.0)


def test_without_steps_lines_are_counted_and_epochs_are_steps_where_they_are_named():
    assert steps(read("loss: 2.0\nhello\nloss: 1.0\n")) == [(1, 2.0), (2, 1.0)]
    assert steps(read("Epoch 1/3 - loss: 2.0\nEpoch 2/3 - loss: 1.0\n")) == [(1, 2.0), (2, 1.0)]


def test_the_last_rank_is_listened_to_where_the_others_print_nothing():
    numbers = Numbers(generation=1, num_ranks=4)
    line = b" iteration 10/ 20 | lm loss: 2.0E+00 | grad norm: 1.0 |\n"
    assert numbers.feed(0, b"hello\n", 0.0) == ([], False)
    assert steps(numbers.feed(3, line, 0.0)[0]) == [(10, 2.0)]


def test_losses_of_the_last_rank_count_after_rank_0_has_said_what_it_saved():
    numbers = Numbers(generation=1, num_ranks=2)
    line = " iteration {0}/ 20 | lm loss: 2.0E+00 | grad norm: 1.0 |\n"
    saved = b"  successfully saved checkpoint from iteration 10 to checkpoints [ t 1/1, p 1/1 ]\n"
    assert steps(numbers.feed(1, line.format(10).encode(), 0.0)[0]) == [(10, 2.0)]
    (event,), _ = numbers.feed(0, saved, 1.0)
    assert isinstance(event, log.CheckpointSaved)
    assert numbers.feed(1, saved, 1.0) == ([], True)  # said again
    assert steps(numbers.feed(1, line.format(11).encode(), 2.0)[0]) == [(11, 2.0)]


def test_rank_0_counts_where_every_rank_prints():
    numbers = Numbers(generation=1, num_ranks=2)
    assert numbers.feed(1, b"step 1 loss=9.0\n", 0.0)[0]
    assert steps(numbers.feed(0, b"step 1 loss=2.0\n", 0.0)[0]) == [(1, 2.0)]
    assert numbers.feed(1, b"step 2 loss=9.0\n", 0.0) == ([], True)


def test_tokens_of_each_rank_are_all_ranks_tokens():
    text = "step:  4  loss:  7.6  grad_norm: 2.5  memory: 1.0GiB(1%)  tps: 1,000  mfu: 10%\n"
    (line,) = read(text, num_ranks=8)
    assert isinstance(line, StepMetrics)
    assert (line.tokens_per_s, line.mfu) == (8000.0, 0.1)


def test_a_step_takes_the_time_between_two_lines():
    lines = Lines(1)
    list(lines.add(10, {"loss": 2.0}, at=100.0))
    (line,) = lines.add(20, {"loss": 1.0}, at=105.0)
    assert isinstance(line, StepMetrics)
    assert line.step_s == 0.5


def test_numbers_of_one_step_that_come_apart_are_one_line():
    lines = Lines(1)
    list(lines.add(3, {"loss": 2.0}, at=1.0))
    (line,) = lines.add(3, {"grad_norm": 0.5}, at=2.0)
    assert isinstance(line, StepMetrics)
    assert (line.loss, line.grad_norm, line.at) == (2.0, 0.5, 1.0)
    assert list(lines.add(3, {"grad_norm": 0.5}, at=3.0)) == []


def test_steps_without_numbers_are_written_now_and_then_and_at_the_end():
    lines = Lines(1)
    written = [line for step in range(1, 100) for line in lines.add(step, {}, at=step / 10)]
    assert len(written) == 2
    assert [line.step for line in lines.end()] == [99]
    assert written[1].at >= STEPS_EVERY_S


def test_a_loss_that_is_not_finite_is_not_one_that_is_unknown(tmp_path):
    found = read("step 1 loss=nan\nstep 2 lr=0.1 loss=1.5\n")
    writer = MetricsLog(tmp_path / "metrics.jsonl")
    for line in found:
        assert isinstance(line, StepMetrics)
        writer.write(line)
    writer.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first.loss, first.not_finite) == (None, ["loss"])
    assert (second.loss, second.not_finite) == (1.5, [])
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"loss":null' in text[0]
    assert "null" not in text[1]  # what is unknown is left out


def test_garbage_is_no_progress():
    numbers = Numbers(generation=1, num_ranks=1)
    assert numbers.feed(0, bytes(range(256)) * 500, 0.0) == ([], False)


def test_steps_that_are_seen_at_once_share_the_time_between_two_looks():
    numbers = Numbers(generation=1, num_ranks=1)
    numbers.feed(0, b"step 1 loss=4.0\n", 10.0)
    found, _ = numbers.feed(0, b"step 2 loss=3.0\nstep 3 loss=2.0\n", 10.1)
    assert [line.step_s for line in found if isinstance(line, StepMetrics)] == pytest.approx(
        [0.05] * 2
    )


@pytest.mark.parametrize("piece", [64, 100_000])
@pytest.mark.parametrize(
    ("name", "expected", "evaluated"),
    [
        (
            "lightning-2.6.6.txt",
            [(8, 0.0811), (9, 0.129), (15, 0.114), (16, 0.0617)],
            [(8, 0.203), (16, 0.162)],
        ),
        (
            "transformers-5.23.txt",
            [(2, 4.179), (4, 4.164), (6, 4.163), (8, 4.16), (10, 4.155)],
            [(5, 4.154), (10, 4.154)],
        ),
    ],
)
def test_a_real_log_gives_every_step_its_loss(name, expected, evaluated, piece):
    text = (Path(__file__).parent / "script_logs" / name).read_bytes().decode()
    found = read(text, piece=piece)
    assert set(expected) <= set(steps(found))
    told = [(each.step, each.loss) for each in found if isinstance(each, log.Evaluated)]
    assert told == evaluated
