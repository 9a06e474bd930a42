"""How far the planner is from published measurements, source by source.

    python benchmarks/planner_accuracy.py CSV [--failures CSV] [--loso] [--plot DIR] [--worst N]
                                              [--json FILE]

CSV has the columns of `published_calibration.csv`. Of each source it prints the median of
|log(predicted / measured)|, its bias and its 90th percentile, for

    as shipped     the constants of the catalog, which were fitted to the rows of that file
    left out       constants fitted without the source (`--loso`)
    no fit         the three fitted constants at their priors, in benchmarks/planner_fit.py
    one anchor     the shipped constants, and one row of each (source, accelerator) to set the scale

and how many rows lie in the printed range, of the column that has seen least of the source;
then memory by metric class (`generic`: without what was set for an engine on such rows; `no ...`:
without one of these facts: temporaries of the step, buffers, slack, gathered inputs), whether it
fits (with the failures), the ranking of grids, and the worst rows. Nothing is hidden: rows that are
out of scope are counted with the reason.

Needs scipy for `--loso`, matplotlib for `--plot`.
"""

import argparse
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from planner_fit import choose_micro_batches, fit, priors_only, runs_to_fit
from published import Run, read
from published_columns import Columns, cluster_of, columns_of, is_adapter, why_out_of_scope

from paceline.catalog.efficiencies import load_efficiencies
from paceline.estimate.inputs import Holdings
from paceline.estimate.step import fast_end, slow_end

LOW_MFU = 0.2
"""Rows below it are reported apart in sources of more than a thousand rows."""

ANCHOR_WEIGHT = 0.5
"""Of an anchor's error: a row differs from its source's usual error by about as much as sources
differ from each other, so half is what it tells of them."""

HEAD_ROOM = 1.1
"""Of the estimate of memory: `plan.head_room` leaves a tenth free."""

NEAR_LIMIT = 0.1
"""Rows this near the memory limit do not count for `does it fit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of some runs, as natural logarithms of predicted / measured."""

    runs: tuple[Run, ...]
    values: np.ndarray
    inside: np.ndarray
    """Whether the run lies in the range that is printed: of a step both ends, of memory the
    estimate and the usual head-room."""

    def coverage(self) -> dict[str, float]:
        """Share of each group's runs that lie in the range."""
        groups: dict[str, list[bool]] = defaultdict(list)
        for run, is_inside in zip(self.runs, self.inside, strict=True):
            groups[group_of(run)].append(bool(is_inside))
        return {name: float(np.mean(values)) for name, values in groups.items()}

    def by_source(self) -> dict[str, np.ndarray]:
        groups: dict[str, list[float]] = defaultdict(list)
        for run, value in zip(self.runs, self.values, strict=True):
            groups[group_of(run)].append(float(value))
        return {name: np.array(values) for name, values in groups.items()}


def group_of(run: Run) -> str:
    """A source; its adapters, and its rows of low utilisation where it has very many, apart."""
    if is_adapter(run):
        return f"{run.source} ({run.task})"
    if run.mfu is not None and run.mfu < LOW_MFU and run.source_size > 1000:
        return f"{run.source} (MFU below {LOW_MFU:.0%})"
    return run.source


def is_main(name: str) -> bool:
    """Whether a group counts in the mean over sources."""
    return "(" not in name


def step_errors(columns: Columns, constants: object) -> Errors:
    measured = np.array([run.step_s for run in columns.runs])
    terms = columns.terms(constants)
    inside = (fast_end(terms) <= measured) & (measured <= slow_end(terms))
    return Errors(runs=columns.runs, values=np.log(sum(terms.values()) / measured), inside=inside)


GENERIC = ("step_bytes", "buffer_bytes", "reserved_share", "gathered_inputs")
"""Facts of an engine that only its source or its runs tell."""


def usual_facts(holdings: Holdings) -> dict[str, Any]:
    """Each of `GENERIC` as it is taken where nobody has read the engine: no buffers, a tenth of
    slack, and in the step what torch's AdamW takes, a root of the second moment (torch 2.13,
    optim/adam.py, `_multi_tensor_adam`), with a gradient in float32 where a float32 copy is updated
    from narrower ones (a parameter's gradient has the parameter's type)."""
    is_cast = (np.asarray(holdings.master_bytes) > 0) & (np.asarray(holdings.gradient_bytes) < 4)
    return {
        "step_bytes": holdings.moment_bytes / 2 + 4 * is_cast,
        "buffer_bytes": 0.0,
        "reserved_share": 1.1,
        "gathered_inputs": 0.0,
    }


def memory_errors(columns: Columns, forgotten: Iterable[str] = ()) -> Errors:
    """Errors of the peak, with some facts of the engines forgotten."""
    facts = usual_facts(columns.holdings)
    usual = {name: facts[name] for name in forgotten}
    columns = replace(columns, holdings=replace(columns.holdings, **usual))
    measured = np.array([run.peak_bytes for run in columns.runs])
    predicted = columns.peak_bytes()
    return Errors(
        runs=columns.runs,
        values=np.log(predicted / measured),
        inside=measured <= HEAD_ROOM * predicted,
    )


def anchored(errors: Errors) -> Errors:
    """With one row of each (source, accelerator) known: part of its error is taken off the others.

    The anchor is the row of median step time of the model that has the most rows, and is not
    scored itself. One row has an error of its own, so half of it is taken, and 0.3 at most.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, run in enumerate(errors.runs):
        groups[(group_of(run), run.accelerator)].append(index)
    kept: list[int] = []
    values = errors.values.copy()
    for rows in groups.values():
        models = Counter(errors.runs[index].model_name for index in rows)
        usual = models.most_common(1)[0][0]
        mine = [index for index in rows if errors.runs[index].model_name == usual]
        mine.sort(key=lambda index: errors.runs[index].step_s or 0.0)
        anchor = mine[len(mine) // 2]
        values[rows] -= ANCHOR_WEIGHT * np.clip(errors.values[anchor], -0.3, 0.3)
        kept += [index for index in rows if index != anchor]
    return Errors(
        runs=tuple(errors.runs[index] for index in kept),
        values=values[kept],
        inside=errors.inside[kept],
    )


def show(title: str, columns: Mapping[str, Errors]) -> dict[str, dict[str, float]]:
    """A table: one line a source, one column of medians for each way of predicting."""
    first = next(iter(columns.values()))
    print(f"\n{title}")
    names = "".join(f"{name:>12}" for name in columns)
    print(f"{'source':<28}{'n':>6}{names}    bias   p90  in range")
    judged = "generic" if "generic" in columns else "left out"
    judged = judged if judged in columns else "as shipped"
    coverage = columns[judged].coverage()
    means: dict[str, list[float]] = defaultdict(list)
    for source, values in first.by_source().items():
        cells = ""
        for name, errors in columns.items():
            found = errors.by_source().get(source)
            median = None if found is None else float(np.median(np.abs(found)))
            cells += f"{'-':>12}" if median is None else f"{median:>12.1%}"
            if median is not None and is_main(source):
                means[name].append(median)
        p90 = np.percentile(np.abs(values), 90)
        print(
            f"{source:<28}{len(values):>6}{cells}{np.median(values):>+8.1%}{p90:>6.0%}"
            f"{coverage[source]:>10.0%}"
        )
    print(
        f"{'mean over sources':<34}" + "".join(f"{np.mean(means[name]):>12.1%}" for name in columns)
    )
    main_ones = [share for name, share in coverage.items() if is_main(name)]
    print(f"in the range ({judged}), mean over sources: {np.mean(main_ones):.0%}")
    return {name: {"mean": float(np.mean(values))} for name, values in means.items()}


def leave_one_out(runs: Sequence[Run], columns: Columns) -> Errors:
    """Each source's rows with constants fitted to all the others."""
    micro_batches = choose_micro_batches(runs)
    found: dict[str, tuple[float, bool]] = {}
    sources = list(dict.fromkeys(run.source for run in columns.runs))
    for number, source in enumerate(sources):
        print(f"fitting without {source} ({number + 1} of {len(sources)})", flush=True)
        rest = [run for run in runs_to_fit(runs) if run.source != source]
        constants = fit(columns_of(rest, micro_batches))
        mine = [run for run in columns.runs if run.source == source]
        errors = step_errors(columns_of(mine, micro_batches), constants)
        rows = zip(mine, errors.values, errors.inside, strict=True)
        found |= {run.id: (value, is_inside) for run, value, is_inside in rows}
    return Errors(
        runs=columns.runs,
        values=np.array([found[run.id][0] for run in columns.runs]),
        inside=np.array([found[run.id][1] for run in columns.runs]),
    )


def fits(columns: Columns, failed: Columns | None) -> None:
    """Does it fit: runs that did, and configurations that ran out of memory or crashed."""
    print("\nDoes it fit? Rows more than 10 % away from the limit.")
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    limit = np.array([cluster_of(run).memory_bytes for run in columns.runs])
    measured = np.array([run.peak_bytes for run in columns.runs])
    predicted = columns.needed_bytes()
    for run, bound, seen, guess in zip(columns.runs, limit, measured, predicted, strict=True):
        if bound and abs(seen / bound - 1) > NEAR_LIMIT:
            total[f"ran: {group_of(run)}"] += 1
            right[f"ran: {group_of(run)}"] += int((guess <= bound) == (seen <= bound))
    if failed is not None:
        limit = np.array([cluster_of(run).memory_bytes for run in failed.runs])
        for run, bound, guess in zip(failed.runs, limit, failed.needed_bytes(), strict=True):
            if bound and abs(guess / bound - 1) > NEAR_LIMIT:
                total[f"failed: {run.source}"] += 1
                right[f"failed: {run.source}"] += int(guess > bound)
    for name, number in total.items():
        print(f"  {name:<42}{right[name]:>5} of {number:>5}  {right[name] / number:.1%}")
    share = right.total() / max(total.total(), 1)
    print(f"  {'all':<42}{right.total():>5} of {total.total():>5}  {share:.1%}")


def ranking(errors: Errors) -> None:
    """Grids: one model on one number of ranks, the configuration varied."""
    print("\nRanking: families of at least four configurations of one model on as many ranks")
    print(f"{'source':<28}{'families':>9}{'best in 3':>11}{'regret':>9}{'p90':>7}{'Spearman':>10}")
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(errors.runs):
        key = (group_of(run).split(" (")[0], run.model_name, run.num_ranks, run.accelerator)
        key = (*key, run.seq_len, run.precision, run.global_batch if run.source_size > 1000 else 0)
        families[key].append(index)
    results: dict[str, list[tuple[bool, float, float]]] = defaultdict(list)
    for key, rows in families.items():
        if len(rows) < 4:
            continue
        runs = [errors.runs[index] for index in rows]
        rate = np.array(
            [(run.step_s or 1) / ((run.global_batch or 1) * run.seq_len) for run in runs]
        )
        guess = rate * np.exp(errors.values[rows])
        order = np.argsort(guess)
        is_in_three = int(np.argmin(rate)) in order[:3]
        regret = rate[order[0]] / rate.min() - 1
        correlation = np.corrcoef(np.argsort(np.argsort(rate)), np.argsort(np.argsort(guess)))[0, 1]
        results[str(key[0])].append((is_in_three, float(regret), float(correlation)))
    for source, values in results.items():
        found = np.array(values, float)
        print(
            f"{source:<28}{len(values):>9}{found[:, 0].mean():>11.0%}{np.median(found[:, 1]):>9.1%}"
            f"{np.percentile(found[:, 1], 90):>7.0%}{np.nanmean(found[:, 2]):>10.2f}"
        )


def worst(errors: Errors, number: int, what: str) -> None:
    """The rows furthest off, of those that count in the mean."""
    rows = [i for i, run in enumerate(errors.runs) if is_main(group_of(run))]
    rows.sort(key=lambda index: -abs(errors.values[index]))
    print(f"\nWorst rows: {what}")
    for index in rows[:number]:
        run = errors.runs[index]
        print(
            f"  {errors.values[index]:+.2f}  {run.id:<20}{run.model_name[:26]:<27}"
            f"{run.accelerator[:10]:<11}"
            f"n {run.num_ranks} {run.sharding} tp {run.tensor} pp {run.pipeline} cp {run.context} "
            f"ep {run.expert} mbs {run.micro_batch} {run.precision} {run.recompute or '?'}"
        )


def plot(path: Path, errors: Errors, measured: Iterable[float], title: str, unit: str) -> None:
    """Predicted against measured, one colour a source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = np.array(list(measured))
    figure, axes = pyplot.subplots(figsize=(7, 6.5))
    names = np.array([group_of(run) for run in errors.runs])
    for name in dict.fromkeys(names):
        mine = names == name
        axes.scatter(
            values[mine], (values * np.exp(errors.values))[mine], s=10, alpha=0.6, label=name
        )
    ends = [values.min(), values.max()]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, np.array(ends) * 0.9, np.array(ends) * 1.1, color="grey", alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    axes.set_title(title)
    axes.legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--failures", type=Path)
    parser.add_argument("--loso", action="store_true", help="also leave each source out")
    parser.add_argument("--plot", type=Path, metavar="DIR")
    parser.add_argument("--worst", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the means here")
    options = parser.parse_args()
    reading = read(options.csv)
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(
        f"{options.csv.name}: {len(reading.runs)} rows read, {len(reading.left_out)} out of scope"
    )
    reasons = Counter(reason for _, reason in reading.left_out)
    able: list[Run] = []
    for run in reading.runs:
        reason = why_out_of_scope(run)
        if reason is None:
            able.append(run)
        else:
            reasons[reason] += 1
    for reason, number in reasons.items():
        print(f"  {number:>5}  {reason}")
    means: dict[str, dict[str, dict[str, float]]] = {}
    shipped = load_efficiencies()
    timed = [run for run in able if run.step_s]
    if timed:
        columns = columns_of(timed, choose_micro_batches(timed))
        tables = {
            "as shipped": step_errors(columns, shipped),
            "no fit": step_errors(columns, priors_only()),
        }
        if options.loso:
            tables["left out"] = leave_one_out(able, columns)
        tables["one anchor"] = anchored(tables.get("left out", tables["as shipped"]))
        means["step"] = show("Step time: median |log(predicted / measured)|", tables)
        ranking(tables["as shipped"])
        worst(tables["as shipped"], options.worst, "step time")
        if options.plot:
            options.plot.mkdir(parents=True, exist_ok=True)
            seconds = [run.step_s or 0.0 for run in timed]
            name = options.plot / "step_time.png"
            plot(name, tables["as shipped"], seconds, "Step time", "seconds")
    weighed = [run for run in able if run.peak_bytes and run.micro_batch]
    unstated = sum(1 for run in able if run.peak_bytes and not run.micro_batch)
    if unstated:
        print(f"\n{unstated} rows of memory left out: the micro-batch is not stated")
    if weighed:
        columns = columns_of(weighed)
        for metric in dict.fromkeys(run.metric for run in weighed):
            mine = columns_of([run for run in weighed if run.metric == metric])
            title = f"Peak memory, {metric}: median |log(predicted / measured)|"
            tables = {
                "as shipped": memory_errors(mine),
                "generic": memory_errors(mine, GENERIC),
            }
            for name in GENERIC:
                tables[f"no {name.split('_')[0]}"] = memory_errors(mine, [name])
            show(title, tables)
        errors = memory_errors(columns)
        by_source = errors.by_source()
        each = [np.median(np.abs(v)) for name, v in by_source.items() if is_main(name)]
        general = memory_errors(columns, GENERIC).by_source()
        rest = [np.median(np.abs(v)) for name, v in general.items() if is_main(name)]
        print(f"\nall metrics, mean over sources: {np.mean(each):.1%}; generic {np.mean(rest):.1%}")
        means["memory"] = {"as shipped": {"mean": float(np.mean(each))}}
        over = [np.mean(v < -np.log(1 / 0.9)) for name, v in by_source.items() if is_main(name)]
        print(f"rows that took more than the estimate and 10 % head-room: {np.mean(over):.0%}")
        worst(errors, options.worst, "peak memory")
        failed = None
        if options.failures:
            rows = [run for run in read(options.failures).runs if not why_out_of_scope(run)]
            failed = columns_of([run for run in rows if run.micro_batch])
        fits(columns, failed)
        if options.plot:
            options.plot.mkdir(parents=True, exist_ok=True)
            gib = [(run.peak_bytes or 0) / 2**30 for run in weighed]
            plot(options.plot / "peak_memory.png", errors, gib, "Peak memory of a rank", "GiB")
    if options.json:
        options.json.write_text(json.dumps(means, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
