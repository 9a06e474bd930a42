"""Run a job for a few steps and keep what was seen: the facts of `paceline smoke JOB`.

It is cut down to a few steps of a few samples and run three times as whole `paceline run`s: on
one rank, again from the checkpoint in the middle, and on two ranks over gloo. Nothing is judged
here (`check/smoke.py`).
"""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

from paceline.errors import JobError, PacelineError, PlanError
from paceline.job import Job
from paceline.job.data_rules import is_prepared
from paceline.job.evaluate import EvaluateSpec
from paceline.job.evaluate_rules import measures_loss
from paceline.job.job import (
    CheckpointSpec,
    ClusterSpec,
    DecoderSpec,
    LayoutSpec,
    ModelSpec,
    RecoverySpec,
)
from paceline.job.sources import find_tokenizer
from paceline.job.train import TrainSpec
from paceline.launch.bench import adapted
from paceline.launch.drill import Ran, run_to_end
from paceline.launch.export import export, plan_export
from paceline.launch.factory import measure_factory
from paceline.launch.ready import check_can_run
from paceline.plan import Plan, plan_job
from paceline.prepare import Prepared, TrainedOn, find_data
from paceline.prepare.show import show_sample
from paceline.profile import ModuleFacts, resolve_config
from paceline.record.checkpoints import checkpoint_name, verify_checkpoint
from paceline.record.conversion import LogitsCheck
from paceline.record.events import AnyEvent, read_events
from paceline.record.metrics import StepMetrics, read_metrics
from paceline.record.run import RunFolder, create_run
from paceline.record.tensors import TensorRecord, read_tensors
from paceline.topology.machine import find_local_machine

_BATCH, _SEQ_LEN = 4, 128
"""Samples of a step, and tokens of a sample of plain text. Guesses: four divide by two ranks and
by two micro-batches."""

_MOST_S = 12.0
"""Estimated seconds of one run's steps, above which a small model stands in: three runs and their
starts are to end within a minute. A guess."""

_KEPT = ("optimizer", "betas", "eps", "learning_rate", "weight_decay", "clip_norm", "adapter")
_KEPT_TOO = ("loss_chunk", "router_loss", "objective", "seed")

OnNote = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen of a job. None is what was not tried, or is not known."""

    asked_steps: int
    about: list[str] = field(default_factory=list)
    """What was made smaller or otherwise than asked, for people."""

    events: list[AnyEvent] = field(default_factory=list)
    lines: list[StepMetrics] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Bytes of rank 0, resident, after each step."""

    why_failed: str | None = None
    data_s: float | None = None
    data_found: str = ""
    """What the data are; empty where the program reads its own."""

    token_s: float | None = None
    tokens: int | None = None
    text: str = ""
    """That sample, decoded."""

    parameters: int | None = None
    unchanged: tuple[str, ...] = ()
    """Trained tensors whose bytes are the same in the middle and at the end."""

    damage: str | None = None
    """What is wrong with the last checkpoint's files."""

    again: Ran | None = None
    """The run again, from the checkpoint in the middle."""

    digest: str | None = None
    two: Ran | None = None
    why_not_two: str = ""
    inference: LogitsCheck | None = None
    inference_s: float | None = None
    why_no_inference: str = ""
    own_program: str | None = None


def smoke_job(job: Job, steps: int, folder: Path, *, limit_s: float, on_note: OnNote) -> Seen:
    """Run a job cut down.

    Raises:
        JobError, PlanError: It cannot be run here even so.
    """
    seen = Seen(asked_steps=steps, own_program=job.spec.program)
    one, two = _cases(job, steps, seen.about)
    began = time.monotonic()
    data = find_data(one[0])
    _look_at_data(one[0], data, seen)
    seen.data_s = time.monotonic() - began - (seen.token_s or 0.0)
    on_note(f"{steps} steps on one rank")
    ran = _run(one, data, folder / "one-rank", limit_s)
    seen.events, seen.lines, seen.digest = ran.events, ran.lines, ran.digest
    seen.memory = [line.memory_bytes for line in ran.lines if line.memory_bytes is not None]
    if ran.digest is None:
        seen.why_failed = last_words(ran.run)
        return seen
    half, last = (ran.run.checkpoints / checkpoint_name(step) for step in (steps // 2, steps))
    _compare_tensors(half, last, seen)
    seen.why_not_two = _why_not_two(one[0])
    is_over = threading.Event()
    run = partial(_run, data=data, limit_s=limit_s, is_over=is_over)
    tasks: list[Callable[[], None]] = [partial(_infer, ran.run, last, folder / "exported", seen)]
    if not seen.why_not_two:
        tasks.append(lambda: setattr(seen, "two", run(two, folder=folder / "two-ranks")))
    if half.is_dir():  # a save that failed is in the events
        again = folder / "from-checkpoint"
        tasks.append(lambda: setattr(seen, "again", run(one, folder=again, start=half)))
    on_note(f"from the checkpoint of step {steps // 2}, on two ranks over gloo, and inference")
    _do_all(tasks, is_over, at_once=_fits(seen.memory))
    return seen


def _do_all(
    tasks: Sequence[Callable[[], object]], is_over: threading.Event, *, at_once: bool
) -> None:
    """Do independent tasks, most of whose time is imports on one core."""
    with ThreadPoolExecutor(len(tasks) if at_once else 1) as pool:
        try:
            for each in [pool.submit(task) for task in tasks]:
                each.result()
        finally:
            is_over.set()
            pool.shutdown(cancel_futures=True)


def _fits(memory: list[int]) -> bool:
    """Whether all tasks fit beside each other, by what the run on one rank held: one rank, two
    ranks, and the two models of a comparison."""
    return 5 * max(memory, default=0) < find_local_machine().available_bytes


Case = tuple[Job, Plan]


def _cases(job: Job, steps: int, about: list[str]) -> tuple[Case, Case]:
    """The cut-down job on one rank and on two; what became otherwise goes into `about`.

    Raises:
        JobError, PlanError: It cannot be planned even so.
    """
    small = _cut(job, steps)
    if job.spec.train.precision not in ("auto", "fp32"):
        about.append(f"in fp32, not {job.spec.train.precision}: `paceline verify` tries that")
    if job.spec.engine != "paceline":
        about.append(f"by Paceline's own runtime, not {job.spec.engine}")
    try:
        (one, two), notes = _planned(small)
        step_s = one[1].estimate.step_s
        is_large, why = step_s is not None and step_s * steps > _MOST_S, "too slow"
    except PlanError:
        is_large, why = True, "too large"
    if is_large:
        if job.spec.program is not None or job.spec.model.factory is not None:
            named = job.spec.program or job.spec.model.factory
            raise JobError.of(
                code="R076",
                what=f"the model of {named} is {why} for a smoke run on this machine's CPU",
                where=job.where("program" if job.spec.program else "model.factory"),
                fix="name a smaller one: --set model.factory=module:small_model",
            )
        small = _with_small_model(small)
        about.append(f"a decoder of 2 layers, width 64: the job's model is {why} for this CPU")
        if job.spec.train.adapter is not None:
            about.append("all of that decoder is trained, without the job's adapter")
        (one, two), notes = _planned(small)
    about += notes
    JobError.raise_for(dict.fromkeys([*check_can_run(*one), *check_can_run(*two)]))
    return one, two


def _cut(job: Job, steps: int) -> Job:
    """What the job trains and on what, in few steps on the CPU; all else is as by default."""
    spec = job.spec
    kept = {name: getattr(spec.train, name) for name in (*_KEPT, *_KEPT_TOO)}
    train = TrainSpec(
        global_batch=_BATCH,
        steps=steps,
        schedule="constant",
        precision="fp32",
        deterministic=True,
        **kept,
    )
    data = spec.data
    if not is_prepared(job) and spec.program is None:
        data = replace(data, seq_len=min(data.seq_len, _SEQ_LEN))
    asked = spec.layout
    names = ("tensor", "pipeline", "context", "sharding")
    cut = replace(
        type(spec)(name=spec.name, model=spec.model, train=train, data=data),
        program=spec.program,
        layout=LayoutSpec(**{name: getattr(asked, name) for name in names}),
        checkpoint=CheckpointSpec(every=steps // 2, keep_last=2),
        recovery=RecoverySpec(max_restarts=0, spares=0, shrink=False),
    )
    if measures_loss(spec):
        cut = replace(cut, evaluate=EvaluateSpec(every=steps, samples=_BATCH))
    return replace(job, spec=cut, length=None)


def _planned(job: Job) -> tuple[tuple[Case, Case], list[str]]:
    facts = measure_factory(job)
    try:
        return _plans(job, facts)
    except PlanError:
        if job.spec.layout == LayoutSpec():
            raise
        job = replace(job, spec=replace(job.spec, layout=LayoutSpec()))
        cases, _ = _plans(job, facts)
        return cases, ["with the planner's layout: the job's own does not exist on two ranks"]


def _plans(job: Job, facts: ModuleFacts | None) -> tuple[tuple[Case, Case], list[str]]:
    found, notes = list[Case](), list[str]()
    for count in (1, 2):
        layout, notes = adapted(job.spec.layout, count)
        cluster = ClusterSpec(accelerator="cpu", per_node=count)
        case = replace(job, spec=replace(job.spec, cluster=cluster, layout=layout))
        found.append((case, plan_job(case, facts)))
    return (found[0], found[1]), notes


def _with_small_model(job: Job) -> Job:
    tokenizer = find_tokenizer(job)
    model = job.spec.model
    vocab = 256 if tokenizer is None else _vocab(job)
    small = ModelSpec(
        decoder=DecoderSpec(layers=2, hidden=64, heads=4, vocab=vocab),
        tokenizer=model.tokenizer if tokenizer is None else str(tokenizer),
        chat_template=model.chat_template,
    )
    train = replace(job.spec.train, adapter=None)
    return replace(job, spec=replace(job.spec, model=small, train=train))


def _vocab(job: Job) -> int:
    asked = resolve_config(job)
    if asked is not None:
        return int(asked.config["vocab_size"])
    decoder = job.spec.model.decoder
    return decoder.vocab if decoder is not None else 256


def _look_at_data(job: Job, data: TrainedOn | None, seen: Seen) -> None:
    if data is None:
        return
    began = time.monotonic()
    if isinstance(data, Prepared):
        shown = show_sample(data.folder, 0, find_tokenizer(job))
        seen.tokens = sum(each.num_tokens for each in shown.documents)
        seen.text = "".join(text for each in shown.documents for _, text in each.parts)
        number = sum(source.samples for source in data.index.train)
        seen.data_found = f"{number} samples in {data.num_files} files"
    else:
        with data.train[0].open("rb") as file:
            content = file.read(job.spec.data.seq_len)
        seen.tokens, seen.text = len(content), content.decode(errors="replace")
        number = data.num_samples(job.spec.data.seq_len)
        seen.data_found = f"{number} samples in {data.num_files} files"
    seen.token_s = time.monotonic() - began


def _run(
    case: Case,
    data: TrainedOn | None,
    folder: Path,
    limit_s: float,
    *,
    is_over: threading.Event | None = None,
    start: Path | None = None,
) -> Ran:
    run = create_run(*case, folder=folder, runs=folder.parent, data=data)
    if start is not None:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.copytree(start, run.checkpoints / start.name)

    def look() -> None:
        if is_over is not None and is_over.is_set():
            raise KeyboardInterrupt  # another task failed, or the person stopped all

    ran = run_to_end(run, on_look=look, limit_s=limit_s)
    return replace(ran, lines=read_metrics(run.metrics_file))


def _compare_tensors(half: Path, last: Path, seen: Seen) -> None:
    problem = verify_checkpoint(last)
    if problem is not None:
        seen.damage = problem.what
        return
    before, after = read_tensors(half) or {}, read_tensors(last) or {}
    weights = {name: each for name, each in after.items() if name.startswith("model/")}
    seen.parameters = sum(prod(each.size) for each in weights.values())
    seen.unchanged = tuple(
        name.removeprefix("model/")
        for name, each in weights.items()
        if "float" in each.dtype and name in before and _hashes(before[name]) == _hashes(each)
    )


def _hashes(record: TensorRecord) -> list[str]:
    return [piece.xxh3_128 for piece in record.pieces]


def _why_not_two(job: Job) -> str:
    """Dropout draws other masks on two ranks, so that the losses differ by right."""
    asked = resolve_config(job) if job.spec.model.factory is None else None
    config = {} if asked is None else asked.config
    for name, value in config.items():
        if "drop" in name and isinstance(value, float) and value > 0:
            return (
                f"{name} is {value:g}, whose masks differ on two ranks; `paceline verify` is exact"
            )
    return ""


def _infer(run: RunFolder, checkpoint: Path, out: Path, seen: Seen) -> None:
    """Export the trained model, load it as transformers does, and compare its logits."""
    began = time.monotonic()
    try:
        asked = plan_export(run, checkpoint, out)
        seen.inference = export(asked, lambda exported: "").check
    except PacelineError as error:
        if error.problems[0].code == "C013":
            seen.inference = LogitsCheck(problem=error.problems[0])
        seen.why_no_inference = error.problems[0].what
    seen.inference_s = time.monotonic() - began


def last_words(run: RunFolder) -> str:
    """Why a run ended, as its record has it; else the last line of rank 0."""
    for event in reversed(read_events(run.events_file)):
        reason = getattr(event, "reason", None) or getattr(event, "detail", None)
        if reason:
            return str(reason)[:500]
    log = run.rank_log(0)
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1][:500] if lines else f"see {run.logs}"
