"""What it costs to know that a step may be committed: `Groups.settle`, beside a vote outside.

    .venv/bin/python benchmarks/commit_cost.py                     2, 4 and 8 ranks, gloo and double
    .venv/bin/python benchmarks/commit_cost.py --ranks 2 --rounds 200

In every round all ranks sum a vote as a step does and read it, and then, in an order that changes,
`settle` (synchronise, look at the generation's flag, ask each group for its error) and an AND of
all ranks over the rendezvous store, as torchft's `should_commit` asks its manager. A round's cost
is the slowest rank's. `double` is the tests' device and group (tests/sim), whose synchronisation
costs what Python threads cost; on a GPU the host has waited for the vote already.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import interval, machine, spread

ROOT = Path(__file__).parents[1]
STEP_S = 0.1
"""The step that the cost is a share of."""

WARM_UP = 5


def main() -> None:
    options = _parse()
    if options.rank is not None:
        _rank(options)
        return
    print(machine())
    print(f"share of a {1000 * STEP_S:.0f} ms step; median of n rounds, 95 % interval")
    for backend in options.backends:
        for ranks in options.ranks:
            rounds = _rounds(backend, ranks, options.rounds)
            for name, column in (("settle", 0), ("vote outside", 1)):
                values = [each[column] for each in rounds]
                pairs = [(value, STEP_S) for value in values]
                middle, low, high = interval(pairs, _share)
                print(
                    f"{backend:6} {ranks} ranks  {name:12} {middle:8.4%} ({low:.4%} to {high:.4%})"
                    f"  {spread([1e6 * value for value in values], 'us', 1)}",
                    flush=True,
                )


def _share(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(cost for cost, _ in pairs) / STEP_S


def _rounds(backend: str, ranks: int, rounds: int) -> list[tuple[float, float]]:
    """For each round the slowest rank's seconds: of settle, and of the vote outside."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", __file__, "--rank", str(rank)),
                *("--ranks", str(ranks), "--rounds", str(rounds)),
                *("--port", str(store.port), "--backends", backend),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for rank in range(ranks)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return [tuple(map(max, zip(*each, strict=True))) for each in zip(*found, strict=True)]


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from paceline.control.messages import Join
    from paceline.runtime.devices import DEVICES, Device, device_of
    from paceline.runtime.recovery.groups import Groups, listen_for_store

    if options.backends == ["double"]:
        from tests.sim import backend, device

        backend.install()
        DEVICES["gloo"] = Device(device.NAME, backend.MIXED)
    (world,), here = options.ranks, device_of("gloo", 0)
    groups = Groups(backend=DEVICES["gloo"].transports, listener=listen_for_store(0))
    order = Join(
        generation=1,
        rank=options.rank,
        local_rank=0,
        world_size=world,
        host="127.0.0.1",
        port=options.port,
        faults=[],
    )
    groups.join(order, here)
    store, told = dist.TCPStore("127.0.0.1", options.port, None, False), []

    def outside(number: int) -> None:
        if store.add(f"vote/{number}", 1) == world:
            store.set(f"decided/{number}", "")
        store.wait([f"decided/{number}"])

    for number in range(WARM_UP + options.rounds):
        votes = torch.ones(8, dtype=torch.float64, device=here)
        dist.all_reduce(votes)
        votes.tolist()
        spent = {}
        calls = [("settle", lambda: groups.settle(here)), ("outside", lambda: outside(number))]  # noqa: B023
        for name, call in calls if number % 2 else reversed(calls):
            began = time.perf_counter()
            call()
            spent[name] = time.perf_counter() - began
        told.append((spent["settle"], spent["outside"]))
    print(json.dumps(told[WARM_UP:]), flush=True)
    dist.barrier()
    os._exit(0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--backends", nargs="+", choices=("gloo", "double"), default=["gloo", "double"]
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
