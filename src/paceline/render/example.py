"""The example program that the files start where nobody names another one.

`scripts/lm_plain.py` is the data, the schedule and what is said at the end, for every engine;
`scripts/lm.py` the model, for those of PyTorch; `scripts/train_<engine>.py` what is the engine's
own. They run without Paceline. What the plan says they read from `train.json`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pkgutil import get_data
from typing import Any

from paceline.job import Job
from paceline.job.data_fields import has_tokenizer
from paceline.job.training import decay_steps
from paceline.plan import Plan
from paceline.render.carried import needs
from paceline.render.engine import Gap
from paceline.render.text import to_json

SETTINGS = "train.json"
PLAIN = "lm_plain.py"
_OWN_PROGRAM = "TRAIN_SCRIPT"
"""Named in what comes nearest wherever only a program of the person's own does it."""


def example(plan: Plan, job: Job, *scripts: str) -> dict[str, str]:
    """`train.json`, `lm_plain.py` and the named files of `scripts/`; the first is called
    `train.py`."""
    found = {SETTINGS: to_json(settings(plan, job)), PLAIN: script_text(PLAIN)}
    for place, name in enumerate(scripts):
        found["train.py" if place == 0 else name] = script_text(name)
    return found


def settings(plan: Plan, job: Job) -> dict[str, Any]:
    """What the example programs read: model, data, batch, schedule and layout."""
    layout, spec, shape = plan.layout, job.spec, plan.decoder
    model = (
        None
        if shape is None
        else {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "ffn": shape.ffn,
            "vocab": shape.vocab,
        }
    )
    named = [spec.data.path] if isinstance(spec.data.path, str) else spec.data.path
    # Beside the program, where somebody has copied them, or where the job file says.
    paths = named and [place for name in named for place in (name, str(job.folder / name))]
    return {
        "name": spec.name,
        "model": model,
        "other_model": _other_model(plan),
        "program": spec.program,
        "needs": [gap.what for gap in _needs(job)],
        "parameters": plan.profile.num_parameters,
        "data": {"paths": paths, "corpus": spec.data.corpus, "seq_len": spec.data.seq_len},
        "batch": {
            "global": layout.global_batch,
            "micro": layout.micro_batch,
            "accumulation": layout.accumulation,
            "data_ranks": layout.data,
        },
        "layout": {
            "sharding": layout.sharding,
            "shard": layout.shard_degree,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "context": layout.context,
            "expert": layout.expert,
            "reduces_every_micro_batch": layout.sharding == "zero2"
            or layout.reduce_every_micro_batch,
            "recompute": layout.recompute,
            "recompute_every": layout.recompute_every,
            "offload": layout.offload,
        },
        "precision": plan.precision,
        "steps": spec.train.steps,
        "learning_rate": spec.train.learning_rate,
        "warmup_steps": spec.train.warmup_steps,
        "schedule": spec.train.schedule,
        "final_learning_rate": spec.train.final_learning_rate,
        "decay_steps": decay_steps(spec.train),
        "optimizer": spec.train.optimizer,
        "betas": list(spec.train.betas),
        "eps": spec.train.eps,
        "adapter": None if spec.train.adapter is None else spec.train.adapter.kind,
        "gradient_compression": spec.train.gradient_compression,
        "compile": spec.train.compile,
        "bucket_bytes": None if spec.train.bucket == "auto" else spec.train.bucket,
        "weight_decay": spec.train.weight_decay,
        "clip_norm": spec.train.clip_norm,
        "seed": spec.train.seed,
        "checkpoint_every": plan.checkpoint_every,
        "keep_checkpoints": spec.checkpoint.keep_last,
    }


def _other_model(plan: Plan) -> str | None:
    """Name of a model that is not the decoder of `lm.py`."""
    return plan.profile.name if plan.decoder is None else None


def _needs(job: Job) -> Iterator[Gap]:
    """What of the job's weights and data no example program reads."""
    yield from needs(job)
    model, data = job.spec.model, job.spec.data
    if data.kind == "tokens":
        why = "the example program reads bytes of text"
        yield Gap(what="data.kind tokens", where="data.kind", why=why, nearest=None)
    if has_tokenizer(job) and job.spec.program is None:
        named = model.pretrained if model.tokenizer == "auto" else model.tokenizer
        yield Gap(
            what=f"the tokenizer of {named}",
            where="model.tokenizer",
            why="the example program's tokens are bytes",
            nearest=None,
            fix="leave engine out for Paceline's own runtime, or model.tokenizer: bytes",
        )


@cache
def script_text(name: str) -> str:
    """The text of a program of `scripts/`."""
    found = get_data("paceline.render", f"scripts/{name}")
    assert found is not None  # a file of this package
    return found.decode()


def example_gaps(plan: Plan, job: Job) -> list[Gap]:
    """What the job asks of its training and no example program does, in any engine: all but the
    last are in `train.json`, and `lm_plain.check` ends the program where it reads them."""
    train, spec = job.spec.train, job.spec
    own = "train.py ends before its first step: set TRAIN_SCRIPT to your own, on the same ranks"
    found: list[Gap] = []

    def lack(what: str, why: str, where: str, fix: str = "", nearest: str = own) -> None:
        found.append(Gap(what=what, why=why, nearest=nearest, fix=fix, where=where))

    if spec.program is not None:
        why = "it is called with a Session, which Paceline's own workers alone have"
        lack(f"your program {spec.program}", why, "program", "`paceline run`")
    other = _other_model(plan)
    if other is not None:
        lack(f"the model {other}", "the example program has a small decoder of its own", "model")
    found += (replace(gap, nearest=own) for gap in _needs(job))
    if train.optimizer != "adamw":
        what, why = f"the optimizer {train.optimizer}", "the example program has AdamW only"
        lack(what, why, "train.optimizer", "train.optimizer: adamw")
    if train.adapter is not None:
        what, why = f"adapters ({train.adapter.kind})", "the example program trains every weight"
        lack(what, why, "train.adapter")
    if train.gradient_compression != "none":
        what = f"gradients sent as {train.gradient_compression}"
        why, where = "the example program sends them whole", "train.gradient_compression"
        lack(what, why, where, f"{where}: none")
    if train.compile:
        why = "the example program is eager"
        lack("compiled blocks", why, "train.compile", "train.compile: false")
    if spec.checkpoint.copy_to is not None:
        what = f"copies of checkpoints to {spec.checkpoint.copy_to}"
        why = "the example program writes into its own folder"
        lack(what, why, "checkpoint.copy_to", nearest="your own TRAIN_SCRIPT does it")
    return found


def runs_example(plan: Plan, job: Job) -> bool:
    """Whether the example program trains the job's model, so that nobody has to name another."""
    return plan.decoder is not None and job.spec.program is None


def needs_own_program(gap: Gap) -> bool:
    """Whether only a program of the person's own does it."""
    return _OWN_PROGRAM in (gap.nearest or "")


def without_own_program(gaps: Iterable[Gap], fix: str = "") -> list[Gap]:
    """The gaps where the example program is what runs: those that only a program of the person's
    own could fill are refusals.

    Args:
        gaps: Of an engine that starts either.
        fix: Said beside each refusal's own: how a program of one's own is named there.
    """
    return [
        replace(gap, nearest=None, fix=", or ".join(filter(None, (gap.fix, fix))))
        if needs_own_program(gap)
        else gap
        for gap in gaps
    ]
