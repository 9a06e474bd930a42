"""The example program that the files start where nobody names another one.

`scripts/lm_plain.py` is the data, the schedule and what is said at the end, for every engine;
`scripts/lm.py` the planned model, as transformers builds it, for those of PyTorch;
`scripts/train_<engine>.py` what is the engine's own. They run without Paceline. What the plan says
they read from `train.json`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pkgutil import get_data
from typing import Any, Literal

from paceline.job import Job
from paceline.job.data_rules import has_tokenizer, objective_of
from paceline.job.pretrained import find_pretrained, loads_weights
from paceline.job.sources import (
    absolute_paths,
    find_tokenizer,
    names_absent_tokenizer,
    tokenizer_folder,
)
from paceline.job.train_rules import decay_steps
from paceline.parallel.abilities import EXAMPLES_OVER
from paceline.plan import Plan
from paceline.profile.resolve import written_config
from paceline.profile.runnable import left_out, reasons_against_running
from paceline.render.carried import needs
from paceline.render.device import kernel_refusals
from paceline.render.engine import Gap
from paceline.render.model import router_coefficient
from paceline.render.shell import presence_lines
from paceline.render.text import to_json

SETTINGS = "train.json"
PLAIN = "lm_plain.py"
_OWN_PROGRAM = "TRAIN_SCRIPT"
STOPS = "the example train.py stops before its first step"
OWN_SCRIPT = f"{STOPS}; start a script of your own with TRAIN_SCRIPT=my.py"
"""What a gap's `nearest` begins with where the example program cannot train the job."""

"""Named in what comes nearest wherever only your own program does it."""

Builder = Literal["transformers", "own"]
"""What builds an example program's model: transformers, any that predicts the next token; or the
program itself, a Llama or Qwen2 with drawn weights."""


def example(plan: Plan, job: Job, *scripts: str) -> dict[str, str]:
    """`train.json`, `lm_plain.py` and the named files of `scripts/`; the first is called
    `train.py`. With `lm.py` among them transformers builds the model. For accelerators that none
    of the programs knows, `train.json` alone."""
    builds: Builder = "transformers" if "lm.py" in scripts else "own"
    found = {SETTINGS: to_json(settings(plan, job, builds))}
    if plan.cluster.backend not in EXAMPLES_OVER:
        return found
    found[PLAIN] = script_text(PLAIN)
    for place, name in enumerate(scripts):
        found["train.py" if place == 0 else name] = script_text(name)
    return found


def settings(plan: Plan, job: Job, builds: Builder = "transformers") -> dict[str, Any]:
    """What the example programs read: model, data, batch, schedule and layout."""
    layout, spec = plan.layout, job.spec
    pretrained = find_pretrained(job) if loads_weights(job) else None
    commit = None if pretrained is None else pretrained.commit
    named = [spec.data.path] if isinstance(spec.data.path, str) else spec.data.path
    # Beside the program, where somebody has copied them, or where the job file says.
    paths = named and [place for name in named for place in (name, str(job.folder / name))]
    return {
        "name": spec.name,
        # A config.json for transformers; the sizes for programs that build the model themselves.
        "model": _config(job),
        "decoder": _decoder(plan, job),
        "lacks_model": _lacks_model(plan, job, builds),
        "pretrained": None if pretrained is None else pretrained.name,
        "revision": commit,
        "router_loss": router_coefficient(job) if _has_experts(plan) else 0.0,
        "program": spec.program,
        "needs": [gap.what for gap in _needs(job, builds)],
        "parameters": plan.profile.num_parameters,
        "vocab": plan.profile.head_outputs,
        "data": {
            "kind": spec.data.kind,
            "paths": paths,
            "corpus": spec.data.corpus,
            "seq_len": spec.data.seq_len,
            **_tokenizer(plan, job),
        },
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
        "attention": plan.attention,
        **({} if plan.states == "auto" else {"states": plan.states}),
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
        "bucket_bytes": (
            None if spec.train.bucket == "auto" or layout.keeps_shards else spec.train.bucket
        ),
        "weight_decay": spec.train.weight_decay,
        "clip_norm": spec.train.clip_norm,
        "seed": spec.train.seed,
        "checkpoint_every": plan.checkpoint_every,
        "keep_checkpoints": spec.checkpoint.keep_last,
    }


def _config(job: Job) -> Mapping[str, Any] | None:
    """The config.json of a model that predicts the next token; None for any other."""
    config = written_config(job)
    if config is None or objective_of(job.spec) != "next_token":
        return None
    return None if any(reasons_against_running(config)) else config


def _decoder(plan: Plan, job: Job) -> dict[str, Any] | None:
    """Sizes of a plain Llama or Qwen2; None for any other model."""
    config = _config(job)
    if plan.decoder is None or config is None or any(left_out(config, job.spec.data.seq_len)):
        return None
    return asdict(plan.decoder)


def _has_experts(plan: Plan) -> bool:
    return any(block.experts for block in plan.profile.blocks)


def _lacks_model(plan: Plan, job: Job, builds: Builder) -> str | None:
    """Name of a model that the example program cannot build."""
    is_own = builds == "own" or plan.layout.pipeline > 1
    found = _decoder(plan, job) if is_own else _config(job)
    return plan.profile.name if found is None else None


def program_lines(plan: Plan) -> list[str]:
    """A shell line that ends the launch script where no program is named for accelerators that the
    example program cannot use."""
    if plan.cluster.backend in EXAMPLES_OVER:
        return []
    own = f"set it to your own program for {plan.cluster.accelerator}; train.json has the plan"
    return [f': "${{{_OWN_PROGRAM}:?{own}}}"']


def node_lines(plan: Plan, job: Job) -> list[str]:
    """Lines of a launch script that name at once what a node of a declared cluster does not have
    and the example program reads. Patterns are left to the program."""
    if plan.cluster.is_local or job.spec.program is not None:
        return []
    paths = [path for path in absolute_paths(job) if not set(path) & set("*?[")]
    return presence_lines(paths, unless=[_OWN_PROGRAM])


def _tokenizer(plan: Plan, job: Job) -> dict[str, str | None]:
    """The tokenizer's folder or name, with its commit; None where a byte is a token. A declared
    cluster may have by an absolute path what this machine has not."""
    if not _makes_tokens(job):
        return {"tokenizer": None, "tokenizer_revision": None}
    if not plan.cluster.is_local and names_absent_tokenizer(job):
        return {"tokenizer": tokenizer_folder(job), "tokenizer_revision": None}
    file, own = find_tokenizer(job), find_pretrained(job)
    assert file is not None, "the job has a tokenizer"
    if job.spec.model.tokenizer == "auto" and own is not None and own.commit is not None:
        return {"tokenizer": own.name, "tokenizer_revision": own.commit}
    return {"tokenizer": str(file.parent), "tokenizer_revision": None}


def _makes_tokens(job: Job) -> bool:
    """Whether the example program has text to make tokens of."""
    plain = job.spec.data.kind in ("auto", "text") and job.spec.data.sources is None
    return plain and has_tokenizer(job) and job.spec.program is None


def _needs(job: Job, builds: Builder) -> Iterator[Gap]:
    """What of the job's weights and data an example program does not read."""
    read = ("model.pretrained",) if builds == "transformers" else ()
    yield from (gap for gap in needs(job) if gap.where not in read)


@cache
def script_text(name: str) -> str:
    """The text of a program of `scripts/`."""
    found = get_data("paceline.render", f"scripts/{name}")
    assert found is not None  # a file of this package
    return found.decode()


def example_gaps(plan: Plan, job: Job, builds: Builder = "transformers") -> list[Gap]:
    """What the job asks of its training and no example program does, in any engine: all but the
    last are in `train.json`, and `lm_plain.check` ends the program where it reads them."""
    train, spec = job.spec.train, job.spec
    found: list[Gap] = []

    def lack(what: str, why: str, where: str, fix: str = "", nearest: str = OWN_SCRIPT) -> None:
        found.append(Gap(what=what, why=why, nearest=nearest, fix=fix, where=where))

    if spec.program is not None:
        why = "it is called with a Session, which Paceline's own workers alone have"
        lack(f"your program {spec.program}", why, "program", "`paceline run`")
    other = _lacks_model(plan, job, builds)
    if other is not None and spec.program is None:
        has, fix = "models that predict the next token, of transformers", ""
        if builds == "own" or plan.layout.pipeline > 1:
            has = "Llama and Qwen2 only, without sliding windows or scaled positions"
            if builds != "own" and _config(job) is not None:
                has, fix = f"{has}, in a pipeline", "layout.pipeline: 1"
        lack(f"the model {other}", f"the example program has {has}", "model", fix)
    found += (replace(gap, nearest=OWN_SCRIPT) for gap in _needs(job, builds))
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
    if train.bucket != "auto" and plan.layout.keeps_shards:
        why = "sharded gradients are reduce-scattered block by block, in no bucket of a given size"
        fix = "layout.sharding: none, or leave train.bucket out"
        lack("train.bucket", why, "train.bucket", fix, "buckets as the engine has them")
    found += kernel_refusals(plan)
    if train.compile:
        why = "the example program is eager"
        lack("compiled blocks", why, "train.compile", "train.compile: false")
    if spec.checkpoint.copy_to is not None:
        what = f"copies of checkpoints to {spec.checkpoint.copy_to}"
        why = "the example program writes into its own folder"
        lack(what, why, "checkpoint.copy_to", nearest="your own TRAIN_SCRIPT does it")
    return found


def folder_gaps(job: Job) -> Iterator[Gap]:
    """Trained weights in a folder of this machine, for machines that do not see its disk."""
    found = find_pretrained(job) if loads_weights(job) else None
    if found is not None and found.commit is None:
        yield Gap(
            what=f"the trained weights in {found.folder}",
            where="model.pretrained",
            why="they are on this machine",
            nearest="the same folder on the machines of the run: train.py ends where it is missing",
            fix="model.pretrained: the name of a model on the Hugging Face Hub",
        )


def runs_example(plan: Plan, job: Job) -> bool:
    """Whether the example program trains the job's model, so that nobody has to name another."""
    return _config(job) is not None and job.spec.program is None


def needs_own_program(gap: Gap) -> bool:
    """Whether only your own program does it."""
    return _OWN_PROGRAM in (gap.nearest or "")


def without_own_program(gaps: Iterable[Gap], fix: str = "") -> list[Gap]:
    """The gaps where the example program is what runs: those that only a program of the person's
    own could fill are refusals.

    Args:
        gaps: Of an engine that starts either.
        fix: Said beside each refusal's own: how your own program is named there.
    """
    return [
        replace(gap, nearest=None, fix="; or ".join(filter(None, (gap.fix, fix))))
        if needs_own_program(gap)
        else gap
        for gap in gaps
    ]
