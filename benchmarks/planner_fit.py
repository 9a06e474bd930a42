"""Fit the constants of `catalog/efficiencies.toml` to published runs.

    python benchmarks/planner_fit.py published_calibration.csv            shows what it would write
    python benchmarks/planner_fit.py published_calibration.csv --write    writes it

One set of constants for all sources. Each source weighs the same (small ones by their number), the
loss is smoothly absolute, so that outliers do not pull, and every constant is held near its prior:
a value from a data sheet, a paper or a count of operations. Constants nobody measures stay there.

Needs scipy.
"""

import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from published import Run, read
from published_columns import Columns, columns_of, is_adapter, why_out_of_scope

from paceline.catalog.efficiencies import Efficiencies, load_efficiencies

PRIOR = 0.18
"""Weight of a constant's relative distance from its prior, against one source's median error.
Chosen among 0.04, 0.12, 0.18, 0.25 and 0.5 by the errors of the fit and of what was left out."""

_SOFT = 0.08
"""Errors beyond this count as absolute, smaller ones as squared."""

# path: (prior, lowest, highest, how many times as firmly it is held). A tuple of paths is one
# constant.
_CONSTANTS: Mapping[tuple[str, ...], tuple[float, float, float, float]] = {
    ("sustained.V100",): (0.90, 0.5, 1.1, 1),
    ("sustained.H100", "sustained.H200", "sustained.other"): (0.78, 0.45, 1.1, 1),
    ("sustained.B200",): (0.70, 0.45, 1.1, 1),
    ("sustained.GB300",): (0.75, 0.45, 1.1, 1),
    ("sustained_by_precision.fp8",): (1.0, 0.6, 1.5, 1),
    ("attention.flash1",): (0.50, 0.3, 0.95, 1),
    ("attention.flash1_hopper",): (0.30, 0.15, 0.8, 1),
    ("attention.flash2_hopper",): (0.37, 0.2, 0.8, 1),
    ("attention.flash3",): (0.75, 0.3, 0.95, 1),
    ("attention.backward",): (0.82, 0.6, 1.1, 2),
    ("attention_half_len.H100", "attention_half_len.H200"): (1300, 100, 6000, 1),
    (
        "attention_half_len.B200",
        "attention_half_len.GB200",
        "attention_half_len.GB300",
    ): (2500, 100, 6000, 1),
    ("hidden_passes.eager",): (12, 4, 30, 2),
    ("host_s.fused",): (20e-6, 2e-6, 40e-6, 4),
    ("step.memory_share",): (0.80, 0.5, 0.92, 1),
    ("step.gradient_overlap",): (0.85, 0, 1, 1),
    ("step.gather_overlap",): (0.92, 0, 1, 1),
    ("step.tensor_overlap",): (0.35, 0, 0.9, 1),
    ("step.routed_ops",): (200, 20, 400, 3),
    ("step.contention",): (0.10, 0, 0.4, 0.5),
    ("step.straggler",): (0.006, 0, 0.03, 0.5),
    ("step.step_s",): (0.020, 0, 0.06, 0.5),
}
"""Priors: published measurements and our first fits (matrix rates, attention, collectives, host
launch 30 us, overlap, contention, stragglers); passes: counted from the operations of a block,
unfused, with fused norms and activations, and compiled; routed_ops, grouped_share
and step_s: guesses."""


def fit(
    columns: Columns, prior: float = PRIOR, fitted: Collection[str] | None = None
) -> Efficiencies:
    """The shipped constants with those of `_CONSTANTS` fitted to the columns' measured steps; where
    some are named in `fitted`, by their first path, the others are at their priors."""
    from scipy.optimize import least_squares

    priors_of = {paths: row[0] for paths, row in _CONSTANTS.items()}
    base = with_constants(load_efficiencies(), priors_of)
    measured = np.log([run.step_s for run in columns.runs])
    weights = source_weights(columns.runs)
    table = [
        (paths, row) for paths, row in _CONSTANTS.items() if fitted is None or paths[0] in fitted
    ]
    priors = np.array([row[0] for _, row in table])
    firm = np.array([row[3] for _, row in table])
    low = np.array([row[1] for _, row in table]) / priors
    high = np.array([row[2] for _, row in table]) / priors

    def constants(shares: np.ndarray) -> Efficiencies:
        values = dict(zip((paths for paths, _ in table), priors * shares, strict=True))
        return with_constants(base, values)

    def residuals(shares: np.ndarray) -> np.ndarray:
        error = (np.log(columns.step_s(constants(shares))) - measured) / _SOFT
        soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error * error) - 1)) * _SOFT
        return np.concatenate([weights * soft, prior * firm * (shares - 1)])

    start = np.clip(np.ones(len(table)), low + 1e-6, high - 1e-6)
    found = least_squares(
        residuals, start, bounds=(low, high), max_nfev=40, diff_step=1e-3, x_scale="jac"
    )
    return constants(found.x)


def with_constants(base: Efficiencies, values: Mapping[tuple[str, ...], float]) -> Efficiencies:
    """The constants with some of them changed, by their paths in the file."""
    tables: dict[str, dict[str, float]] = {}
    for paths, value in values.items():
        for path in paths:
            table, key = path.split(".")
            tables.setdefault(table, dict(getattr(base, table)))[key] = float(value)
    return replace(base, **tables)


def source_weights(runs: Sequence[Run]) -> np.ndarray:
    """Each source weighs as much as another; one of fewer than five runs by their number."""
    count = Counter(run.source for run in runs)
    each = [min(1.0, count[run.source] / 5) / count[run.source] for run in runs]
    return np.sqrt(each)


def runs_to_fit(runs: Sequence[Run]) -> list[Run]:
    """Runs whose step time the constants are fitted to.

    Left out: adapters; runs of configurations that were measured again under a newer version of
    the same software; and runs below a fifth of the peak's model FLOPs, where a machine was mostly
    waiting for something that no column names (1,262 rows of one grid).
    """
    kept: list[Run] = []
    seen: set[str] = set()
    for run in runs:
        key = re.search(r"cfgkey=(\w+)", run.notes)
        if is_adapter(run) or run.step_s is None or why_out_of_scope(run):
            continue
        if key is not None and key[1] in seen:
            continue
        if run.mfu is not None and run.mfu < 0.2 and run.source_size > 1000:
            continue
        if key is not None:
            seen.add(key[1])
        kept.append(run)
    return kept


def choose_micro_batches(runs: Sequence[Run]) -> dict[str, int]:
    """What the planner would take where a source does not state the micro-batch: the fastest."""
    best: dict[str, tuple[float, int]] = {}
    for size in (1, 2, 4, 8):
        able = [
            run
            for run in runs
            if not run.micro_batch and run.global_batch and run.global_batch / run.data % size == 0
        ]
        if not able:
            continue
        steps = columns_of(able, {run.id: size for run in able}).step_s(load_efficiencies())
        for run, step in zip(able, steps, strict=True):
            if step < best.get(run.id, (np.inf, 0))[0]:
                best[run.id] = (step, size)
    return {name: size for name, (_, size) in best.items()}


def write(constants: Efficiencies, path: Path) -> None:
    """Change the numbers in the file and nothing else."""
    lines = path.read_text(encoding="utf-8").splitlines()
    table = ""
    fitted = {path for paths in _CONSTANTS for path in paths}
    for number, line in enumerate(lines):
        if line.startswith("["):
            table = line.strip("[]")
        key = line.split(" = ")[0]
        if f"{table}.{key}" in fitted:
            lines[number] = f"{key} = {getattr(constants, table)[key]:.3g}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    source = Path(sys.argv[1])
    runs = runs_to_fit(read(source).runs)
    columns = columns_of(runs, choose_micro_batches(runs))
    constants = fit(columns)
    shipped = load_efficiencies()
    for paths in _CONSTANTS:
        table, key = paths[0].split(".")
        old, new = getattr(shipped, table)[key], getattr(constants, table)[key]
        print(f"{paths[0]:<34}{old:>12.4g} -> {new:.4g}")
    if "--write" in sys.argv:
        target = Path(__file__).parents[1] / "src/paceline/catalog/efficiencies.toml"
        write(constants, target)
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
