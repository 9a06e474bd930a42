"""The kit's checks. Each returns one `Line`, and runs on a GPU or, with small sizes, on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from tests.gpu.kit import CPU_PATIENCE, LIMITS_S, ROOT, Line, tied
from tests.gpu.layouts import LAYOUTS, job_of, median_s, real_rank, stage_of

from paceline.launch.prove import Prover
from paceline.launch.selftest import Check, drilled, job_text
from paceline.plan import Plan, plan_job
from paceline.prove.proof import Proof
from paceline.prove.request import request_of
from paceline.runtime.devices import synchronize

BYTES = {"cuda": 20 << 30, "cpu": 8 << 20}
"""Device -> state that is staged, and twice as much memory that a killed process held."""

GUARDED = {"cuda": 7_000_000_000, "cpu": 1_000_000}
"""Device -> parameters that are fingerprinted, in float32 (28 GB on a GPU)."""

CALIBRATE_S = {"cuda": 80, "cpu": 5}
MAKING_LIMIT_S = 5


def contract(device: str) -> Line:
    """The double's contract, held by real NCCL with one rank."""
    expected = "each sentence of tests/sim/test_contract.py that one rank can show"
    backend = {"PACELINE_CONTRACT": "nccl"} if device == "cuda" else {}
    command = [sys.executable, "-m", "pytest", "-q", "tests/sim/test_contract.py"]
    done = subprocess.run(
        tied([*command, "-k", "one_rank", "-p", "no:cacheprovider"]),
        capture_output=True, text=True, cwd=ROOT, env=os.environ | backend, check=False,
    )  # fmt: skip
    said = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return _line("contract", expected, said, ok=done.returncode == 0)


def memory(device: str) -> Line:
    """The allocator's peak of ten layouts against `prove`."""
    differing, shares, reserved = [], [], []
    for name, seen, (plan, proof) in _layouts(device):
        wanted = proof.stages[stage_of(name, plan)].peak_bytes
        if "failed" in seen:
            differing.append(f"{name} failed: {seen['failed']}")
        elif seen["peak"] is not None:
            shares.append(seen["peak"] / wanted)
            reserved.append(seen["reserved"] / seen["peak"])
            if abs(shares[-1] - 1) > 0.01:
                differing.append(f"{name} {shares[-1]:.3f} of {wanted / 2**30:.2f} GiB")
    if not shares:
        found = f"{len(LAYOUTS) - len(differing)} layouts ran; a CPU has no allocator to ask"
        if differing:
            return _line("memory", "-", f"{found}; {'; '.join(differing)}", ok=False)
        return Line(name="memory", expected="-", found=found, verdict="not run")
    found = (
        f"{len(shares)} layouts, {min(shares):.3f} to {max(shares):.3f} of what is proved; "
        f"reserved up to {max(reserved):.2f} of allocated; {'; '.join(differing) or 'none differs'}"
    )
    return _line("memory", "allocated within 1 % of prove", found, ok=not differing)


def step_time(device: str) -> Line:
    """Compute of the layouts' steps against the planner's; communication is free here."""
    ratios, failed = {}, []
    for name, seen, (plan, proof) in _layouts(device):
        if "failed" in seen:
            failed.append(f"{name} failed: {seen['failed']}")
        elif plan.layout.pipeline == 1 and proof.simulated is not None:
            # A stage alone waits for nobody, so pipelines are left out.
            ratios[name] = seen["seconds"] / proof.simulated.compute_s
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    found = f"measured / planned: {said}" if ratios else "the planner has no rates for this device"
    ok = all(0.9 <= ratio <= 1.1 for ratio in ratios.values()) if device == "cuda" else None
    if failed:
        return _line("time", "-", f"{found}; {'; '.join(failed)}", ok=False)
    return _line("time", "within 10 % of the planner's compute", found, ok=ok if ratios else None)


def calibrate(device: str) -> Line:
    """Products, attention and copies at the rates that the catalog's estimates rest on."""
    command = [sys.executable, "-m", "paceline.runtime.calibrate", "--device", device]
    command += ["--seconds", str(CALIBRATE_S[device])]
    done = subprocess.run(tied(command), capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return _line("calibrate", "it runs", done.stderr.strip()[-300:], ok=False)
    measured = json.loads(done.stdout)
    rates = [
        2.0 * each["rows"] * each["inner"] * each["columns"] / each["seconds"]
        for each in measured["products"]
    ]
    copies = [each["num_bytes"] / each["seconds"] for each in measured["memory"]]
    found = f"products up to {max(rates) / 1e12:.1f} TFLOP/s" if rates else "no product"
    found += f", copies up to {max(copies) / 1e12:.2f} TB/s" if copies else ""
    return _line("calibrate", "H100: 70 to 85 % of 989 TFLOP/s, 85 to 95 % of 3.35 TB/s", found)


_ALONE = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
device, store, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
began = time.monotonic()
try:
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=0,
        world_size=2, timeout=timedelta(seconds=limit_s),
    )
    dist.all_reduce(torch.ones(1, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    print("made", time.monotonic() - began, flush=True)
except Exception as error:
    print(type(error).__name__, time.monotonic() - began, flush=True)
os._exit(0)
"""


def making(device: str) -> Line:
    """Rank 0 of 2, and nobody comes: when does making the group end?"""
    found = {}
    for way, blocking in (("non-blocking", "1"), ("blocking", "0")):
        env = {
            "TORCH_NCCL_USE_COMM_NONBLOCKING": blocking,
            "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(MAKING_LIMIT_S),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        }
        with TemporaryDirectory() as folder:
            words = [device, f"{folder}/store", str(MAKING_LIMIT_S)]
            found[way] = _child(_ALONE, words, limit_s=20, env=env) or "killed after 20 s"
        if device == "cpu":
            break  # gloo has one way
    said = "; ".join(f"{way}: {what}" for way, what in found.items())
    how, _, seconds = found["non-blocking"].partition(" ")
    ends = how not in ("made", "killed") and float(seconds) > 0.8 * MAKING_LIMIT_S
    return _line("making", f"non-blocking raises after {MAKING_LIMIT_S} s", said, ok=ends)


_HOLDER = """
import sys, time, torch
held = torch.ones(int(sys.argv[2]), dtype=torch.uint8, device=sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def death(device: str) -> Line:
    """How long a killed process keeps its device memory, and whether another can start at once."""
    num_bytes = 2 * BYTES[device]
    command = [sys.executable, "-c", _HOLDER, device, str(num_bytes)]
    process = subprocess.Popen(tied(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    before = _free_bytes(device)
    process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    process.wait()
    process.stdout.close()
    gone_s = time.monotonic() - began
    while device == "cuda" and _free_bytes(device) < before + num_bytes * 0.9:
        if time.monotonic() - began > 30:
            return _line("death", "memory comes back", "not within 30 s", ok=False)
        time.sleep(0.01)
    free_s = time.monotonic() - began
    torch.ones(num_bytes, dtype=torch.uint8, device=device)
    found = f"process gone after {gone_s:.2f} s, {num_bytes / 2**30:.2f} GiB after {free_s:.2f} s"
    return _line("death", "some seconds: the number goes into the policy", found)


_STICKY = """
import os, sys, torch
device = sys.argv[1]
table = torch.nn.Embedding(4, 4, device=device)
def fails(call):
    try:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return "works"
first = fails(lambda: table(torch.tensor([9], device=device)))
print(first, fails(lambda: torch.ones(1, device=device) + 1), flush=True)
os._exit(0)
"""


def sticky(device: str) -> Line:
    """After a device assert every call of the process fails; a fresh process works."""
    first, _, following = _child(_STICKY, [device], limit_s=30).partition(" ")
    fresh = _child("import torch, sys; print(torch.ones(1, device=sys.argv[1]).item())", [device])
    found = f"the assert: {first}; the next call: {following}; a fresh process: {fresh}"
    wanted = following != "works" if device == "cuda" else following == "works"
    expected = "the next call fails" if device == "cuda" else "the next call works"
    ok = wanted and first != "works" and fresh == "1.0"
    return _line("sticky", f"{expected}, a fresh process works", found, ok=ok)


def stall(device: str) -> Line:
    """The checkpoint's stage: state to pinned memory, and read back."""
    from paceline.runtime.checkpoint._stage import Stage

    num = BYTES[device] // 4 // 8
    tensors = [torch.full((num,), float(number), device=device) for number in range(8)]
    records = [SimpleNamespace(num_bytes=4 * num) for _ in tensors]
    share: Any = SimpleNamespace(tensors=tensors, records=records)
    stage = Stage()
    times = []
    for _ in range(2):  # the first one makes and pins the memory
        began = time.monotonic()
        starts = stage.copy(share)
        times.append(time.monotonic() - began)
    assert stage.fd is not None
    right = all(
        os.pread(stage.fd, 4, start) == torch.tensor(float(number)).numpy().tobytes()
        for number, start in enumerate(starts)
    )
    stage.close()
    rate = BYTES[device] / times[1]
    found = f"{BYTES[device] / 2**30:.2f} GiB at {rate / 1e9:.1f} GB/s, first {times[0]:.2f} s"
    fast = rate > 20e9 if device == "cuda" else True
    return _line("stall", "over 20 GB/s, values right", found, ok=right and fast)


def two_ranks(device: str) -> Line:
    """Two ranks of NCCL on one GPU, where it can: faults in whole runs, and SHA-256 compared."""
    if device != "cuda":
        return Line(name="two-ranks", expected="-", found="a CPU has no NCCL", verdict="not run")
    version = tuple(torch.cuda.nccl.version())
    if version < (2, 30):
        known = ".".join(str(part) for part in version)
        found = f"NCCL is {known}, which gives two ranks no GPU in common; put 2.30 before torch's"
        return Line(name="two-ranks", expected="-", found=found, verdict="not run")
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
    said = _pair(_SUM, device, "nccl", env=env, limit_s=40)
    if said != ["3.0", "3.0"]:
        found = f"no all_reduce: {'; '.join(said)}"
        return _line("two-ranks", "an all_reduce gives 3.0", found, ok=False)
    os.environ.update(env)
    checks = list(drills("tests.gpu.nursery"))
    found = "; ".join(f"{each.name} {each.status}: {each.found}" for each in checks)
    ok = all(each.status == "pass" for each in checks)
    return _line("two-ranks", "the undisturbed SHA-256 after every fault", found, ok=ok)


def drills(nursery: str) -> Iterator[Check]:
    """The faults in runs of two ranks, whose workers come from this nursery."""
    os.environ["PACELINE_NURSERY"] = nursery
    for name, (optimizer, steps, faults) in DRILLS.items():
        with TemporaryDirectory() as folder:
            job = Path(folder) / "job.yaml"
            job.write_text(job_text("cpu", nodes=2, per_node=1, steps=steps, optimizer=optimizer))
            yield drilled(job, Path(folder), faults, name=name, steps=steps)


DRILLS = {
    "kills and a stop": (
        "adamw",
        18,
        (
            "kill rank=1 step=4 phase=backward",
            "kill rank=1 step=8 phase=vote",
            "kill rank=1 step=8 phase=restore",
            "stop rank=1 step=14",
        ),
    ),
    "Muon's step": ("muon", 9, ("kill rank=1 step=6 phase=apply",)),
}
"""Name -> the optimizer, the steps and the faults of one run. The kill while a state is restored
hits the rank that takes the killed one's place."""


_MEET = """
import hashlib, os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
device, backend, store, rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def meet(name, seconds=100):
    dist.init_process_group(backend, init_method=f"file://{store}-{name}", rank=rank,
                            world_size=2, timeout=timedelta(seconds=seconds))
"""
_SUM = (
    _MEET
    + """
meet("sum")
one = torch.full((1,), rank + 1.0, device=device)
dist.all_reduce(one)
print(one.item(), flush=True)
os._exit(0)
"""
)
_HEAL = (
    _MEET
    + """
torch.manual_seed(0)
role = sys.argv[5]
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.AdamW(model.parameters())
def train(first, last):
    for step in range(first, last):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(data.to(device)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if role == "dies" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
def held():
    return torch.cuda.memory_allocated() if device == "cuda" else 0
if role in ("calm", "dies", "survives"):
    meet("first")
    try:
        train(0, 8 if role == "calm" else 4)
    except RuntimeError:
        pass
before = held()
if role in ("survives", "comes"):
    if role == "survives":
        optimizer.zero_grad()
        dist.destroy_process_group()
    meet("second")
    if role == "comes":
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        for value in optimizer.state[parameter].values():
            dist.broadcast(value, 0)
    done = int(next(iter(optimizer.state.values()))["step"])
    train(done, 8)
state = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
print(state.hexdigest()[:16], held() - before if role == "survives" else 0, flush=True)
os._exit(0)
"""
)


def gloo_on_gpu(device: str) -> Line:
    """Device tensors over gloo: one of two processes is killed, another one is healed by it."""
    calm = _pair(_HEAL, device, "gloo", roles=("calm", "calm"))
    broken = _pair(_HEAL, device, "gloo", roles=("survives", "dies", "comes"))
    expected = "the undisturbed SHA-256, the same memory"
    if failed := [said for said in (*calm, *broken) if said.startswith(_NOTHING)]:
        return _line("gloo-on-gpu", expected, failed[0], ok=False)
    states = {said.split()[0] for said in (*calm, *broken) if said}
    more = max((int(said.split()[1]) for said in broken if said), default=0)
    found = f"SHA-256 {', '.join(sorted(states))}; device memory after - before: {more} bytes"
    ok = len(states) == 1 and more == 0 and sum(map(bool, broken)) == 2
    return _line("gloo-on-gpu", expected, found, ok=ok)


def same_bits(device: str) -> Line:
    """A run twice with deterministic kernels, and what those cost a step."""
    words = [] if device == "cuda" else ["--cpu"]
    command = [sys.executable, "-m", "paceline", "selftest", "--ranks", "1", "--json", *words]
    done = subprocess.run(tied(command), capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        return _line("same-bits", "it runs", done.stderr.strip()[-300:], ok=False)
    checks = json.loads(done.stdout)["checks"]
    times = {
        wanted: _layout("FSDP2", device, deterministic=wanted)["seconds"]
        for wanted in (False, True)
    }
    price = times[True] / times[False] - 1
    found = f"{checks[-1]['found']}; deterministic kernels cost {price:+.1%} of a step"
    return _line("same-bits", "equal; the price in %", found, ok=done.returncode == 0)


def guard(device: str) -> Line:
    """What fingerprints of a whole state take."""
    from paceline.runtime.recovery.fingerprint import fingerprint

    where = torch.device(device)
    tensors = [torch.ones(GUARDED[device] // 16, device=device) for _ in range(16)]
    names = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    seconds = median_s(lambda: fingerprint(iter(names)), where)
    found = f"{GUARDED[device] / 1e9:g} billion parameters in {1000 * seconds:.1f} ms"
    return _line("guard", "below 1 % of a step at the chosen interval", found)


def compiled(device: str) -> Line:
    """One compiled graph for all blocks, and the time of the first step."""
    from torch._dynamo.utils import counters

    from paceline.runtime.strategy.compiling import compile_blocks

    job = job_of("sharding: none", device, _accelerator(device))
    where = torch.device(device)
    with real_rank(job, plan_job(job), 0, where) as made:
        backend = "inductor" if device == "cuda" else "aot_eager"
        compile_blocks(made.model, device_type=device, backend=backend)
        began = time.monotonic()
        made.step()
        synchronize(where)
        first_s = time.monotonic() - began
        seconds = median_s(made.step, where)
    graphs = counters["stats"]["unique_graphs"]
    found = f"{graphs} graphs, first step {first_s:.1f} s, then {1000 * seconds:.1f} ms"
    return _line("compile", "one graph a kind of block", found, ok=graphs == 1)


CHECKS: Mapping[str, Callable[[str], Line]] = {
    "contract": contract,
    "memory": memory,
    "time": step_time,
    "calibrate": calibrate,
    "making": making,
    "death": death,
    "sticky": sticky,
    "stall": stall,
    "two-ranks": two_ranks,
    "gloo-on-gpu": gloo_on_gpu,
    "same-bits": same_bits,
    "guard": guard,
    "compile": compiled,
}
assert CHECKS.keys() == LIMITS_S.keys()


def _line(name: str, expected: str, found: str, *, ok: bool | None = None) -> Line:
    verdict: Any = {True: "pass", False: "fail", None: "measured"}[ok]
    return Line(name=name, expected=expected, found=found.replace("|", "/"), verdict=verdict)


def _accelerator(device: str) -> str:
    """The catalog's name of this GPU, as the job is planned for it."""
    if device != "cuda":
        return "cpu"
    from paceline.topology.find import catalog_name

    return catalog_name(torch.cuda.get_device_name()) or "H100-SXM"


def _layout(name: str, device: str, *, deterministic: bool = False) -> dict[str, Any]:
    """What `layouts.measure` says, in a process of its own."""
    words = [name, device, _accelerator(device), "on" if deterministic else "off"]
    command = [sys.executable, "-m", "tests.gpu.layouts", *words]
    done = subprocess.run(tied(command), capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _layouts(device: str) -> Iterator[tuple[str, dict[str, Any], tuple[Plan, Proof]]]:
    """Every layout with what was measured, or why it `failed`, and its proof. Proofs need no
    device: as many are made beside the measurements as there are cores for it."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        proofs = {name: pool.submit(_proved, name, device) for name in LAYOUTS}
        for name in LAYOUTS:
            try:
                seen = _layout(name, device)
            except RuntimeError as error:
                seen = {"failed": str(error).strip().splitlines()[-1][-200:]}
            yield name, seen, proofs[name].result()


def _proved(name: str, device: str) -> tuple[Plan, Proof]:
    """What `plan` and `prove` say of a layout, on no device."""
    job = job_of(LAYOUTS[name], device, _accelerator(device))
    plan = plan_job(job)
    with Prover() as prover:
        return plan, prover.prove(request_of(job, plan))


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _child(
    program: str, words: list[str], *, limit_s: float = 60, env: Mapping[str, str] = os.environ
) -> str:
    """The last line that a process prints; empty where it did not end."""
    limit_s *= CPU_PATIENCE if words[0] == "cpu" else 1
    try:
        done = subprocess.run(
            tied([sys.executable, "-c", program, *words]),
            capture_output=True, text=True, timeout=limit_s, env={**os.environ, **env}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return (done.stdout.strip().splitlines() or [""])[-1]


def _pair(
    program: str,
    device: str,
    backend: str,
    *,
    roles: tuple[str, ...] = ("", ""),
    env: Mapping[str, str] | None = None,
    limit_s: float = 50,
) -> list[str]:
    """What the processes print at last, or why they print `_NOTHING`; empty where one was to die.
    The first is rank 0, all others are rank 1."""
    limit_s *= CPU_PATIENCE if device == "cpu" else 1
    with TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                tied([sys.executable, "-c", program, device, backend, f"{folder}/store",
                      str(min(number, 1)), role]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **(env or {})},
            )
            for number, role in enumerate(roles)
        ]  # fmt: skip
        end, said = time.monotonic() + limit_s, []
        for process in processes:
            try:
                printed, why = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                printed, why = process.communicate()[0], f"nothing in {limit_s:.0f} s"
            nothing = f"{_NOTHING} {(why.strip().splitlines() or ['it ended'])[-1]}"
            was_killed = process.returncode == -signal.SIGKILL and not why
            lines = printed.strip().splitlines() or ["" if was_killed else nothing]
            said.append(lines[-1])
        return said


_NOTHING = "no answer:"
