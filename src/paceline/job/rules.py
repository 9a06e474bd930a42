"""Rules between the fields of a job that need nothing but the job itself."""

from collections.abc import Iterator

from paceline.errors import Problem
from paceline.job.alerts import check_alerts
from paceline.job.data_rules import check_data_fields
from paceline.job.evaluate_rules import check_evaluation
from paceline.job.job import Job
from paceline.job.length_rules import check_length
from paceline.job.metrics import check_metrics
from paceline.job.model import MODEL_WAYS
from paceline.job.train_rules import check_phases, check_training
from paceline.job.yaml_text import where_in


def check_rules(job: Job) -> Iterator[Problem]:
    """All of them; those of the length where the job itself says it."""
    spec = job.spec
    yield from _check_sizes(job)
    yield from check_training(spec, job.where)
    yield from check_length(job)
    yield from check_evaluation(spec, job.where)
    yield from check_alerts(spec.alerts, where_in(job.lines, job.source, "alerts"))
    yield from check_metrics(spec.metrics, job.where)
    if spec.train.steps:
        yield from check_steps(job)
    given = [way for way in MODEL_WAYS if getattr(spec.model, way) is not None]
    if len(given) != 1:
        yield Problem(
            code="J007",
            what=f"the model is said {len(given)} ways"
            + (f": {' and '.join(given)}" if given else ""),
            where=job.where("model"),
            fix=f"give exactly one of {', '.join(MODEL_WAYS)}",
        )
    if spec.model.revision is not None and spec.model.pretrained is None:
        yield Problem(
            code="J007",
            what=f"model.revision {spec.model.revision} is given without model.pretrained",
            where=job.where("model.revision"),
            fix="remove it, or name the model by model.pretrained",
        )
    # Another engine is planned for and has a program of its own.
    needs_program = spec.program is None and spec.engine == "paceline"
    yield from check_data_fields(job)
    if spec.model.factory is not None and needs_program:
        yield Problem(
            code="J007",
            what=f"the built-in trainer does not know how to train {spec.model.factory}",
            where=job.where("model.factory"),
            fix="add program: your_module:train (paceline explain own-code), or use model.decoder",
        )
    decoder = spec.model.decoder
    if spec.program is None and decoder is not None and decoder.vocab < 256:
        yield Problem(
            code="J007",
            what=f"model.decoder.vocab is {decoder.vocab}, and the built-in trainer reads bytes, "
            "which have 256 values",
            where=job.where("model.decoder.vocab"),
            fix="leave it out, or set it to 256 or more",
        )


_MOST_SAMPLES, _MOST_RANKS, _MOST_PARAMETERS = 10_000_000, 1_000_000, 10**15
_MOST_TOKENS, _MOST_STEPS = 10**9, 10**12
"""Beyond these a number has surely a digit too many: the largest published batch is some 60 million
tokens, the largest cluster some 200,000 accelerators, the largest model some 10^13 parameters, the
longest sequence some 10^7 tokens."""


def _check_sizes(job: Job) -> Iterator[Problem]:
    """Numbers that no cluster has and no search would come to the end of."""
    train, cluster, size = job.spec.train, job.spec.cluster, job.spec.model.size
    if train.global_batch > _MOST_SAMPLES:
        yield _too_many(job, "train.global_batch", train.global_batch, _MOST_SAMPLES, "samples")
    if cluster.nodes > _MOST_RANKS:
        yield _too_many(job, "cluster.nodes", cluster.nodes, _MOST_RANKS, "ranks")
    elif cluster.per_node != "auto" and cluster.nodes * cluster.per_node > _MOST_RANKS:
        ranks = cluster.nodes * cluster.per_node
        yield _too_many(job, "cluster.per_node", ranks, _MOST_RANKS, "ranks on all nodes")
    if size is not None and size > _MOST_PARAMETERS:
        yield _too_many(job, "model.size", size, _MOST_PARAMETERS, "parameters")
    if job.spec.data.seq_len > _MOST_TOKENS:
        yield _too_many(
            job, "data.seq_len", job.spec.data.seq_len, _MOST_TOKENS, "tokens in a sequence"
        )


def check_steps(job: Job) -> Iterator[Problem]:
    """The number of steps, once it is known, and the phases of the run."""
    steps = job.spec.train.steps
    if steps > _MOST_STEPS:
        field = "steps" if job.length is None else "epochs" if job.length.epochs else "tokens"
        yield _too_many(job, f"train.{field}", steps, _MOST_STEPS, "steps")
    yield from check_phases(job.spec, job.where)


def _too_many(job: Job, field: str, number: int, most: int, unit: str) -> Problem:
    return Problem(
        code="J010",
        what=f"{field} makes {number:.6g} {unit}, and {most:,} are the most that are planned for",
        where=job.where(field),
        fix=f"set {field} so that there are {most:,} {unit} at most",
    )
