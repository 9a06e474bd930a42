"""What is offered where no line names a cause: symptoms' causes, look-alikes, or nothing."""

import re

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.catalog.failure import load_failures
from paceline.catalog.symptom import load_symptoms
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.symptoms import told_causes, words_of
from paceline.record.log_files import Log

WATCHDOG = (
    "[rank3]:[E P.cpp:1] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
    "{seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600010 "
    "milliseconds before timing out.\n"
)


@pytest.mark.parametrize("name", load_symptoms())
def test_a_symptom_is_sourced_and_each_of_its_causes_has_a_check(name):
    symptom = load_symptoms()[name]
    failures = load_failures()
    assert symptom.sources
    assert symptom.of <= failures.keys()
    assert len({cause.id for cause in symptom.causes}) == len(symptom.causes) >= 2
    assert all(cause.id in failures and cause.check for cause in symptom.causes)
    assert all(cause.seen is not None for cause in symptom.causes if cause.only)


TOLD = [symptom for symptom in load_symptoms().values() if symptom.words]


@pytest.mark.parametrize(
    ("words", "name"),
    [("GPUs little used", "gpus-idle"), *((each.title, each.id) for each in TOLD)],
)
def test_a_symptom_told_in_the_words_of_its_title_leads_to_its_causes(words, name):
    causes = told_causes(words, "-", (), by_likeness=True)
    assert load_symptoms()[name].title in {cause.what for cause in causes}


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("all-zero grads", "parameters-not-trained"),
        ("no progress, all ranks wait", "rank-divergent-decision"),
        ("gpus idle and nothing moves for half an hour, no traceback", "rank-divergent-decision"),
    ],
)
def test_s3_3_words_for_a_run_that_stands_still_or_learns_nothing_lead_to_its_causes(words, cause):
    assert cause in [each.id for each in told_causes(words, "-", (), by_likeness=True)][:3]


def test_s3_3_a_repeated_order_comes_before_what_may_also_move_the_loss():
    words = "validation loss oscillates, data in the same order each epoch"
    assert next(told_causes(words, "-", (), by_likeness=True)).id == "set-epoch-missing"


def test_a_bare_time_out_offers_its_well_known_causes_and_the_check_of_each():
    diagnosis = diagnose_text(WATCHDOG.format(seq=812, op="ALLREDUCE", size=9000))
    assert len(diagnosis.causes) >= 3
    assert {cause.confidence for cause in diagnosis.causes[:3]} == {Confidence.POSSIBLE}
    assert all(cause.check for cause in diagnosis.causes[:3])
    assert "collective-watchdog-timeout" in {each.id for each in diagnosis.consequences}


def test_what_the_log_says_of_the_run_moves_the_cause_that_it_speaks_for():
    plain = WATCHDOG.format(seq=812, op="ALLREDUCE", size=9000)
    of = {cause.id for cause in diagnose_text(plain).causes}
    assert "zero3-generate-hang" not in of
    text = "actor rollout: model.generate()\n" + plain
    assert diagnose_text(text).causes[0].id == "zero3-generate-hang"


def test_a_message_that_names_its_cause_is_not_followed_by_causes_that_nothing_speaks_for():
    diagnosis = diagnose_text(
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting "
        "a new one. Parameter indices which did not receive grad for rank 0: 1\n"
    )
    assert diagnosis.causes[0].confidence is Confidence.CERTAIN
    assert [cause.id for cause in diagnosis.causes] == ["ddp-unused-parameters"]


def test_what_only_says_that_nccl_failed_comes_behind_the_likeliest_reasons():
    line = "RuntimeError: NCCL error in: P.cpp:825, unhandled system error, NCCL version 2.7.8\n"
    names = [cause.id for cause in diagnose_text(line).causes[:3]]
    assert names == ["shm-too-small", "nccl-wrong-interface", "nccl-system-error"]


def test_ranks_that_stand_in_different_collectives_differ_in_what_they_call():
    first = WATCHDOG.format(seq=21, op="ALLREDUCE", size=1)
    second = WATCHDOG.replace("rank3", "rank0").replace("Rank 3", "Rank 0")
    status = (
        "[rank{r}]:[E P.cpp:2] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Exception detected by "
        "watchdog at work: {seq}, last enqueued NCCL work: {seq}, last completed NCCL work: "
        "{done}.\n"
    )
    text = first + status.format(r=3, seq=21, done=20)
    text += second.format(seq=22, op="BROADCAST", size=7) + status.format(r=0, seq=22, done=21)
    cause = diagnose_text(text).causes[0]
    assert (cause.id, cause.confidence) == ("rank-divergent-decision", Confidence.LIKELY)
    assert "rank 0 stands at collective 22" in cause.what


def test_a_rank_behind_the_others_in_another_operation_is_told_with_how_long_it_waited():
    ranks = [(0, 4021, "ALLREDUCE"), (1, 4021, "ALLREDUCE"), (2, 4020, "ALLGATHER")]
    line = WATCHDOG.replace("rank3", "rank{r}").replace("Rank 3", "Rank {r}")
    text = "".join(line.format(r=r, seq=seq, op=op, size=9) for r, seq, op in ranks)
    diagnosis = diagnose_text(text)
    cause = diagnosis.causes[0]
    assert (cause.id, cause.confidence) == ("collective-mismatch", Confidence.POSSIBLE)
    assert re.search(r"ranks 0-1 waited \d+ s in collective 4021 \(ALLREDUCE, 9 elem", cause.what)
    assert re.search(r"; rank 2 waited \d+ s in collective 4020 \(ALLGATHER, 9 elem", cause.what)
    assert "uneven-inputs-hang" in {each.id for each in diagnosis.causes}
    (consequence,) = diagnosis.consequences
    assert consequence.count == len(ranks)  # each line is of several patterns of it


@pytest.mark.parametrize(
    "text",
    [
        "frobnicator: fatal: cannot open gate 7\n",
        "KeyError: 'input_ids'\n",
        "error: unrecognized arguments: --local-rank=0\n",
        "make: *** no rule to make target\n",
    ],
)
def test_lines_that_nothing_in_the_catalog_is_about_are_like_nothing(text):
    assert not diagnose_text(text).resembling


def test_a_line_of_other_words_is_unknown_and_what_it_is_like_is_said_to_be_unsure():
    text = "fatal: gloo could not build the full mesh: connect to the loopback address of a peer\n"
    diagnosis = diagnose_text(text)
    assert not diagnosis.causes
    assert not diagnosis.is_concluded
    assert "gloo-loopback-fullmesh" in {each.id for each in diagnosis.resembling}


def test_a_healthy_log_offers_nothing():
    diagnosis = diagnose_text(
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2\n"
        "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2\nepoch 0: loss 2.3\n"
    )
    assert not diagnosis.causes
    assert not diagnosis.resembling


def test_words_are_taken_apart_as_programs_write_them():
    assert words_of("DataLoaderTimeout at 0x7f12 in /opt/a/b/c.py") >= {"data", "loader", "timeout"}
    assert not re.search(r"\d", " ".join(words_of("error 12 at 0xdeadbeef")))


def test_horovods_shut_down_follows_from_the_rank_that_failed_and_is_no_exception_of_its_own():
    shut_down = (
        "[1,1]<stderr>:RuntimeError: Horovod has been shut down. This was caused by an exception "
        "on one of the ranks\nmpirun detected that one or more processes exited with non-zero "
        "status, thus causing\n"
    )
    own = "[1,0]<stderr>:RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
    diagnosis = diagnose_text(own + shut_down)
    assert diagnosis.causes[0].id == "cuda-oom"
    assert "user-exception" not in {each.id for each in diagnosis.causes}
    assert [each.id for each in diagnosis.consequences] == ["child-failed-no-traceback"]
    assert not [each for each in diagnose_text(shut_down).causes if each.confidence == "certain"]


@pytest.mark.parametrize(
    ("words", "first", "among"),
    [
        (
            "training hangs, GPU utilization 0%, no error",  # and so no timeout
            "uneven-inputs-hang",
            "rank-divergent-decision",
        ),
        ("training hangs", "rank0-preprocess-timeout", "uneven-inputs-hang"),
        ("hangs at step 500", "uneven-inputs-hang", "rank0-preprocess-timeout"),
        ("hangs after 2000 steps", "uneven-inputs-hang", "rank-divergent-decision"),
        ("hangs at step 1", "rank0-preprocess-timeout", "uneven-inputs-hang"),
        ("training hangs at the end of the epoch", "uneven-inputs-hang", "rank-divergent-decision"),
        ("NCCL timeout after 30 minutes", "rank0-preprocess-timeout", "rank-divergent-decision"),
        ("loss is nan after 200 steps", "lr-scaled-no-warmup", "nan-loss-undetected"),
        ("loss is nan with fp16", "fp16-loss-scale-collapse", "mixed-precision-loss-scaling"),
        ("same order every epoch", "set-epoch-missing", "sampler-missing"),
        ("every GPU trains on the same data", "sampler-missing", "sampler-missing"),
        (
            "loading checkpoint on 4 GPUs fails, was saved on 8",
            "ckpt-world-size-mismatch",
            "folder-not-shared",
        ),
        (
            "the loss is another after a resume on a different number of GPUs",
            "dcp-uneven-shard-resume",
            "ckpt-world-size-mismatch",
        ),
    ],
)
def test_s3_3_a_symptom_told_in_words_has_the_ranked_causes_of_the_catalog(words, first, among):
    diagnosis = diagnose([Log(name="words", blocks=[words.encode()], is_words=True)])
    ids = [cause.id for cause in diagnosis.causes]
    assert ids[0] == first
    assert among in ids[:3]
    assert {cause.confidence for cause in diagnosis.causes} == {Confidence.POSSIBLE}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("gpu utilization is 30 percent and loader slow", "dataloader-starved"),
        ("my GPUs sit at 20% utilisation most of the time", "dataloader-starved"),
        ("data loading takes longer than the forward pass", "dataloader-starved"),
        ("training is very slow on 2 nodes but fast on one", "ethernet-fallback"),
        ("training with 16 GPUs is barely faster than with 8", "slow-collectives"),
        ("node 3 lags behind the other nodes", "straggler-throttle"),
        ("the first step takes five minutes", "first-step-slow"),
        ("throughput drops after a few hours", "memory-grows"),
        ("my loss does not go down", "learning-rate-unsuited"),
        ("loss stays at 2.3 for 1000 steps", "learning-rate-unsuited"),
        ("weights do not change after optimizer.step", "parameters-not-trained"),
        ("validation loss goes up while training loss goes down", "overfitting"),
        ("sudden jump of the loss at step 5000", "loss-spike"),
        ("after restarting the loss jumps up", "resume-state-not-loaded"),
        ("loss goes up after resume", "resume-state-not-loaded"),
        ("loss is different with 1 gpu and 8 gpus", "global-batch-grew"),
        ("two runs with identical seeds give different losses", "not-deterministic"),
        ("RAM usage keeps increasing during training", "memory-grows"),
        ("saving a checkpoint blocks training for minutes", "checkpoint-stalls"),
        ("nvidia-smi shows only GPU 0 busy", "launcher-plain-python"),
        ("cannot connect to the master node", "rendezvous-c10d-timeout"),
        ("job dies with exit code 137", "host-oom-sigkill"),
        ("no space left on device while saving", "disk-full-checkpoint"),
        ("loss becomes infinite in mixed precision", "lr-scaled-no-warmup"),
    ],
)
def test_s3_3_a_common_trouble_told_in_words_has_its_usual_cause_first(words, first):
    diagnosis = diagnose([Log(name="words", blocks=[words.encode()], is_words=True)])
    assert diagnosis.causes[0].id == first
    assert diagnosis.is_concluded


@pytest.mark.parametrize(
    "words", ["loading the checkpoint of step 500 on 8 GPUs is slow", "8 GPUs of 4 nodes wait"]
)
def test_words_that_name_one_number_of_ranks_are_of_no_checkpoint_of_another(words):
    assert "ckpt-world-size-mismatch" not in {each.id for each in diagnose_text(words).causes}


@pytest.mark.parametrize(
    "text",
    [
        "step 3 loss 2.31\nstep 4 loss 2.29\n",
        "step 1 loss 3\nstep 2 loss 2\nTraining finished\n",
        "hello world, all well",
    ],
)
def test_s3_3_a_healthy_log_and_words_of_nothing_known_stay_without_a_cause(text):
    assert diagnose_text(text).causes == []


def test_a_written_question_is_answered_by_failures_described_in_like_words():
    question = "why do some parameters have no gradient, part of an unused head or branch?"
    assert diagnose_text(question).causes[0].id == "ddp-unused-parameters"


def test_s3_3_a_full_card_of_fsdp_with_cpu_offload_is_that_first():
    oom = (
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 "
        "has a total capacity of 79.10 GiB of which 3.00 GiB is free."
    )
    config = "FSDP config: sharding FULL_SHARD, cpu_offload={}\n"
    ids = [cause.id for cause in diagnose_text(config.format("True") + oom).causes]
    assert ids[0] == "fsdp-cpu-offload-oom"
    ids = [cause.id for cause in diagnose_text(config.format("False") + oom).causes]
    assert ids[0] == "cuda-oom"
