"""Plans for other engines: how many of them render, fit, and come back as the same layout.

    python benchmarks/engine_plans.py [500] [--seed 0] [--list]

Random jobs (tests/render/random_jobs.py: engine x model x cluster, a quarter with part of the
layout fixed, offloading among it, a fifth with a release of the engine, a fifth with a kernel of
attention) are planned until 500 of them have a plan; a job that is refused by the planner says
why and what to change, and is counted apart. Each plan is rendered for its engine, the files are
read back, and the layout that they describe is priced again by the engine's own case. Another
`--seed` draws other jobs; `--list` names each that is not as planned.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from figures import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.render.random_jobs import (
    RENDERER,
    layout_words,
    planned_words,
    random_job,
    random_spec,
    unsaid,
)

from paceline.errors import PacelineError
from paceline.plan import Plan, plan_job
from paceline.render import RenderError, check_files, check_release, render_job

JOBS_A_SEED = 1_000_000
"""Numbers of jobs between one seed's first and the next one's."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One job."""

    number: int
    engine: str
    kind: str
    """`same`, or what went wrong; `refused CODE` where the planner says what to change."""

    why: str = ""
    """The numbers of it."""


def main() -> None:
    """Try jobs until so many have a plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wanted", nargs="?", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    tried: list[Tried] = []
    while sum(not each.kind.startswith("refused") for each in tried) < options.wanted:
        tried.append(attempt(options.seed * JOBS_A_SEED + len(tried)))
    plans = [each for each in tried if not each.kind.startswith("refused")]
    print(f"measured; {machine()}; {time.perf_counter() - began:.0f} s")
    print(f"seed {options.seed}: {len(tried)} random jobs, {len(plans)} plans")
    print(f"{'engine':18} {'plans':>6} {'render, fit, same layout':>26}")
    for engine in sorted({each.engine for each in tried}):
        mine = [each for each in plans if each.engine == engine]
        good = sum(each.kind == "same" for each in mine)
        print(f"{engine:18} {len(mine):6} {good:17} {good / max(len(mine), 1):8.1%}")
    good = sum(each.kind == "same" for each in plans)
    print(f"{'all':18} {len(plans):6} {good:17} {good / len(plans):8.1%}")
    for kind, count in Counter(each.kind for each in tried).most_common():
        print(f"{count:6} {kind}")
    if options.list:
        for each in tried:
            if each.kind != "same":
                print(f"{each.number:5} {each.engine:16} {each.kind:30} {each.why[:230]}")


def attempt(number: int) -> Tried:
    """Plan, render and read back one job."""
    engine = random_spec(number)["engine"]
    try:
        job = random_job(number)
        plan = plan_job(job)
        RenderError.raise_for([*check_files(plan, job)])
    except PacelineError as error:
        problem = error.problems[0]
        fixed = "" if all(each.fix for each in error.problems) else " without a fix"
        return Tried(number, engine, f"refused {problem.code}{fixed}", problem.what)
    if (estimated_only := check_release(plan)) is not None:
        said = plan.cautions[0].what.startswith(estimated_only.what) and estimated_only.fix
        kind = "refused R015 by render, as the plan says first"
        return Tried(number, engine, kind if said else "no files", estimated_only.what)
    try:
        found = render_job(RENDERER.get(engine, engine), plan, job)
    except PacelineError as error:
        problem = error.problems[0]
        return Tried(
            number, engine, f"not rendered: {problem.where.partition(',')[0]}", problem.what
        )
    about = unsaid(found.gaps)
    words = layout_words(engine, found.files)
    expected = planned_words(plan, words)
    differing = {
        name: (expected[name], words[name]) for name in expected if expected[name] != words[name]
    }
    if differing:
        return Tried(number, engine, f"another layout: {', '.join(differing)}", str(differing))
    if not fits(plan):
        return Tried(number, engine, "does not fit")
    if about:
        return Tried(
            number, engine, f"gap: {about[0].where}", f"{about[0].what}: {about[0].nearest}"
        )
    return Tried(number, engine, "same")


def fits(plan: Plan) -> bool:
    """Whether the plan is within its own limit."""
    return plan.estimate.memory.known_bytes <= plan.limit_bytes


if __name__ == "__main__":
    main()
