"""Fit the constants of `catalog/efficiencies.toml` to published runs.

    python benchmarks/planner_fit.py published_calibration.csv            shows what it would write
    python benchmarks/planner_fit.py published_calibration.csv --write    writes it

One set of constants for all sources. Each source weighs the same (small ones by their number), the
loss is smoothly absolute, so that outliers do not pull, and every constant is held near its prior.
All others of that file stay as they are there, each with its source.

Needs scipy.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
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

_CONSTANTS: Mapping[str, tuple[float, float, float, float]] = {
    "sustained_by_precision.fp8": (1.0, 0.6, 1.5, 1),
    "step.memory_share": (0.80, 0.5, 0.92, 1),
    "attention.backward": (0.82, 0.6, 1.1, 2),
    "attention.flash2_hopper": (0.37, 0.2, 0.8, 1),
}
"""Path: prior, lowest, highest, how many times as firmly it is held. Priors: fp8 lasts as bf16
does; 0.80 of the bandwidth, as NVIDIA's aiconfigurator measured elementwise kernels;
FlashAttention's backward pass at 0.82 of its forward one's rate, where FlashAttention 2 reaches
0.63 and 0.73 of the peak at best (arXiv:2307.08691); on Hopper 0.35 (arXiv:2407.08608), a little
more at endless length."""


def fit(columns: Columns, prior: float = PRIOR) -> Efficiencies:
    """The shipped constants with those of `_CONSTANTS` fitted to the columns' measured steps."""
    from scipy.optimize import least_squares

    base = load_efficiencies()
    measured = np.log([run.step_s for run in columns.runs])
    weights = source_weights(columns.runs)
    priors, low, high, firm = np.array(list(_CONSTANTS.values())).T

    def constants(shares: np.ndarray) -> Efficiencies:
        return with_constants(base, dict(zip(_CONSTANTS, priors * shares, strict=True)))

    def residuals(shares: np.ndarray) -> np.ndarray:
        error = (np.log(columns.step_s(constants(shares))) - measured) / _SOFT
        soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error * error) - 1)) * _SOFT
        return np.concatenate([weights * soft, prior * firm * (shares - 1)])

    bounds = (low / priors, high / priors)
    found = least_squares(
        residuals, np.ones(len(priors)), bounds=bounds, max_nfev=40, diff_step=1e-3, x_scale="jac"
    )
    return constants(found.x)


def priors_only() -> Efficiencies:
    """The shipped constants with the fitted ones at their priors."""
    return with_constants(load_efficiencies(), {path: row[0] for path, row in _CONSTANTS.items()})


def with_constants(base: Efficiencies, values: Mapping[str, float]) -> Efficiencies:
    """The constants with some of them changed, by their paths in the file."""
    tables: dict[str, dict[str, float]] = {}
    for path, value in values.items():
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
    for number, line in enumerate(lines):
        if line.startswith("["):
            table = line.strip("[]")
        key = line.split(" = ")[0]
        if f"{table}.{key}" in _CONSTANTS:
            lines[number] = f"{key} = {getattr(constants, table)[key]:.3g}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    source = Path(sys.argv[1])
    runs = runs_to_fit(read(source).runs)
    columns = columns_of(runs, choose_micro_batches(runs))
    constants = fit(columns)
    shipped = load_efficiencies()
    for path in _CONSTANTS:
        table, key = path.split(".")
        old, new = getattr(shipped, table)[key], getattr(constants, table)[key]
        print(f"{path:<34}{old:>12.4g} -> {new:.4g}")
    if "--write" in sys.argv:
        target = Path(__file__).parents[1] / "src/paceline/catalog/efficiencies.toml"
        write(constants, target)
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
