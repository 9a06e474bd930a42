"""How loops and frameworks print, line by line; whole logs are in test_script_numbers.py."""

import math

import pytest
from hypothesis import given, strategies

from paceline.launch.script_lines import Bar, named, read_line


@pytest.mark.parametrize(
    ("line", "step", "num_steps", "values"),
    [
        ("step 10 loss=2.3", 10, None, {"loss": 2.3}),
        ("loss: 2.3", None, None, {"loss": 2.3}),
        ("Epoch 1/2  ━━━━━━━━━╸━━━━━━ 4/8 0:00:00 • 0:00:00 94.15it/s train_loss: 0.074", 12, 24,
         {"loss": 0.074}),
        ("Step 10/100 | loss 2.31 | lr 1e-3 | 12.5k tok/s", 10, 100,
         {"loss": 2.31, "learning_rate": 1e-3, "tokens_per_s": 12500.0}),
        ("[INFO] iter: 1,200, train_loss: 1.5e-1, grad_norm=0.71", 1200, None,
         {"loss": 0.15, "grad_norm": 0.71}),
        ("step=3 loss=nan", 3, None, {"loss": math.nan}),
        ("step 4 loss=tensor(2.5, device='cuda:0')", 4, None, {"loss": 2.5}),
        ("step 5 val_loss=1.5 accuracy=0.89", 5, None, {"eval_loss": 1.5, "eval_accuracy": 0.89}),
        ("step=10, skipped=0, lr=[0, 0], mom=[[0.9, 0.999]]", 10, None, {"learning_rate": 0.0}),
        ("step 99999999999999999999 loss: 2.5", None, None, {"loss": 2.5}),
        ("epoch 2 step 30 loss 0.51 acc 0.9", 30, None, {"loss": 0.51, "accuracy": 0.9}),
        ("step 250: train loss 2.1040, val loss 2.2001", 250, None, {"eval_loss": 2.2001}),
        ("iter 100: loss 2.3456, time 12.34ms, mfu 1.20%", 100, None,
         {"loss": 2.3456, "mfu": 0.012}),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.134000", None, None, {"loss": 2.134}),
        ("Test set: Average loss: 0.0512, Accuracy: 9831/10000 (98%)", None, None,
         {"eval_loss": 0.0512}),
        ("eval: step 40 loss 1.9 accuracy 51%", 40, None,
         {"eval_loss": 1.9, "eval_accuracy": 0.51}),
        ("Epoch: [1][  10/5005]\tTime  0.5 ( 0.6)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.1", 5015,
         None, {"loss": 6.9}),
        ("{'loss': '2.301', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.5'}", None,
         None, {"loss": 2.301, "grad_norm": 1.2, "learning_rate": 5e-5, "epoch": 0.5}),
        ("{'eval_loss': 1.5, 'eval_runtime': 2.0, 'epoch': 1.0}", None, None,
         {"eval_loss": 1.5, "eval_runtime": 2.0, "epoch": 1.0}),
        ('{"step": 7, "loss": 1.25, "lr": 0.001}', 7, None, {"loss": 1.25, "learning_rate": 0.001}),
        (("[2026-01-01 10:00:00,000] [INFO] [logging.py:107:log_dist] [Rank 0] step=20, skipped=0, "
         "lr=[1.5e-05], mom=[[0.9, 0.95]]"), 20, None, {"learning_rate": 1.5e-5}),
        (("\x1b[32m[titan] 2026-02-24 19:46:17 - root - INFO - \x1b[0mstep:  4  loss:  7.62585  "
         "grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: 13.99%"),
         4, None, {"loss": 7.62585, "grad_norm": 26.625, "tokens_per_s_and_rank": 10050.0,
                   "mfu": 0.1399}),
        (("[titan] 2026-02-24 19:46:17,508 - root - INFO - validate step: 40  loss:  3.5  "
         "memory: 66.91GiB(37.51%)  tps: 20,050"), 40, None, {"eval_loss": 3.5}),
        ((" [2025-03-31 05:54:07] iteration       50/  242204 | consumed samples:        50400 | "
         "elapsed time per iteration (ms): 1552.8 | throughput per GPU (TFLOP/s/GPU): 134.0 | "
         "learning rate: 8.000000E-06 | global batch size:  1008 | lm loss: 6.258318E+00 | "
         "loss scale: 1.0 | grad norm: 1.520 | number of skipped iterations:   0 | "
         "number of nan iterations:   0 |"), 50, 242204,
         {"step_s": 1.5528, "learning_rate": 8e-6, "loss": 6.258318, "grad_norm": 1.52}),
        ((" validation loss at iteration 50 on validation set | lm loss value: 6.1E+00 | "
         "lm loss PPL: 4.4E+02 |"), 50, None, {"eval_loss": 6.1}),
    ],
)  # fmt: skip
def test_a_line_of_each_kind_is_understood(line, step, num_steps, values):
    told = read_line(line)
    assert told is not None
    assert (told.step, told.num_steps) == (step, num_steps)
    assert told.values == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize(
    ("line", "done", "total", "title", "values"),
    [
        (" 10%|█         | 3/30 [00:01<00:12,  2.10it/s]", 3, 30, "", {}),
        (" 10%|█         | 3/30 [00:01<00:12,  2.10it/s, loss=2.3, lr=0.1]", 3, 30, "",
         {"loss": 2.3, "learning_rate": 0.1}),
        ("Epoch 1:  22%|██▏       | 4/18 [00:17<01:02,  4.47s/it, v_num=0, train_loss_step=1.5]",
         4, 18, "Epoch 1", {"loss": 1.5}),
        ("Epoch 0:  97% 1651/1702 [13:00<00:24,  2.11it/s, loss=0.158, v_num=0]", 1651, 1702,
         "Epoch 0", {"loss": 0.158}),
        ("Map: 100%|██████████| 1000/1000 [00:00<00:00, 9000.0 examples/s]", 1000, 1000, "Map", {}),
        ("123it [00:04, 30.1it/s, loss=0.5]", 123, None, "", {"loss": 0.5}),
        ("10/100 ━━━━━━━━━━━━━━━━━━━━ 1s 5ms/step - accuracy: 0.51 - loss: 0.6123", 10, 100, "",
         {"accuracy": 0.51, "loss": 0.6123}),
    ],
)  # fmt: skip
def test_a_progress_bar_is_understood(line, done, total, title, values):
    told = read_line(line)
    assert told is not None
    assert told.bar == Bar(done=done, total=total, title=title, is_inner=False)
    assert told.values == values


@pytest.mark.parametrize(
    "line",
    [
        "loading step files from /data/step-3",
        "the loss function is cross entropy",
        "loss scale: 65536",
        "Loss of rank 3: connection closed",
        "blossom: 2.3",
        "packet loss 0.5% at step 3",
        "loss=1,5",
        "loss by class {[1]: 0.5}",
        "{'train_runtime': '2.1', 'train_loss': '0.5', 'epoch': '3'}",
        "{'step': 'one'}",
        "{" * 3000 + "loss",
        "x loss: 1.0 " * 1000,
        "",
    ],
)
def test_other_lines_say_nothing(line):
    assert read_line(line) is None


PIECES = (
    *("step", "=", ":", " ", "10", "1e999", "-", ",", "loss", "lr=[", "]", "{", "}", "'", '"', "|"),
    *("0,", "9" * 400, "nan", "iteration", "/", "%|", "[00:00<", "tps:", "val", "Epoch", "("),
    *("\x1b[A", "step 1: train loss 2, val loss ", "step=1, skipped=0, lr=[", "it ["),
)


@given(strategies.lists(strategies.sampled_from(PIECES), max_size=12))
def test_no_line_that_a_script_prints_is_an_error(pieces):
    read_line("".join(pieces))


def test_checkpoints_are_read_with_their_step():
    megatron = read_line(
        "  successfully saved checkpoint from iteration     500 to /out/ckpt [ t 1"
    )
    trainer = read_line("Saving model checkpoint to out/checkpoint-15")
    assert megatron is not None
    assert trainer is not None
    assert (megatron.step, megatron.checkpoint) == (500, "/out/ckpt")
    assert (trainer.step, trainer.checkpoint) == (15, "out/checkpoint-15")


def test_a_bar_below_another_one_is_marked():
    told = read_line(" 50%|█████     | 1/2 [00:00<00:00]\x1b[A")
    assert told is not None
    assert told.bar is not None
    assert told.bar.is_inner


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("loss", "loss"),
        ("train/loss", "loss"),
        ("train_loss_step", "loss"),
        ("lr", "learning_rate"),
        ("val_loss", "eval_loss"),
        ("eval/loss", "eval_loss"),
        ("valid_accuracy", "eval_accuracy"),
        ("tokens_per_sec", "tokens_per_s"),
        ("loss_scale", None),
        ("reward", None),
    ],
)
def test_names_that_scripts_use_are_ours(theirs, ours):
    assert named(theirs) == ours
