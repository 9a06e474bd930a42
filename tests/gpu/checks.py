"""The kit's checks. Each returns one `Line`, and runs on a GPU or, with small sizes, on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from tests.gpu.kit import CPU_PATIENCE, LIMITS_S, ROOT, Line, tied
from tests.gpu.layouts import LAYOUTS, job_of, median_s, stage_of
from tests.gpu.programs import ALONE, HOLDER, STICKY, SUM
from torch import nn
from torch.distributed.pipelining import PipelineStage

from paceline.launch.prove import Prover
from paceline.launch.selftest import Check, drilled, job_text
from paceline.plan import Plan, plan_job
from paceline.prove.proof import Proof
from paceline.prove.request import request_of

BYTES = {"cuda": 20 << 30, "cpu": 8 << 20}
"""Device -> state that is staged, and twice as much memory that a killed process held. At the most:
a third of what is free, so that a smaller GPU holds both."""

GUARDED = {"cuda": 7_000_000_000, "cpu": 1_000_000}
"""Device -> parameters that are fingerprinted, in float32 (28 GB on a GPU). At the most: two thirds
of the memory that is free."""

CALIBRATE_S = {"cuda": 80, "cpu": 5}
MAKING_LIMIT_S = 5


def contract(device: str) -> Line:
    """The double's contract, held by real NCCL with one rank."""
    expected = "each sentence of tests/sim/test_contract.py that one rank can show"
    backend = {"PACELINE_CONTRACT": "nccl"} if device == "cuda" else {}
    # With the project's own options pytest refuses settings of plugins that are not installed.
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", "filterwarnings="]
    command += ["--import-mode=importlib", "tests/sim/test_contract.py"]
    done = subprocess.run(
        tied([*command, "-k", "one_rank", "-p", "no:cacheprovider"]),
        capture_output=True, text=True, cwd=ROOT, env=os.environ | backend, check=False,
    )  # fmt: skip
    said = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return _line("contract", expected, said, ok=done.returncode == 0)


def memory(device: str) -> Line:
    """The allocator's peak of eleven layouts against `prove`."""
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
        f"{len(shares)} of {len(LAYOUTS)} layouts, {min(shares):.3f} to {max(shares):.3f} of what "
        f"is proved; reserved up to {max(reserved):.2f} of allocated; "
        f"{'; '.join(differing) or 'none differs'}"
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
            found[way] = _child(ALONE, words, limit_s=20, env=env) or "killed after 20 s"
        if device == "cpu":
            break  # gloo has one way
    said = "; ".join(f"{way}: {what}" for way, what in found.items())
    how, _, seconds = found["non-blocking"].partition(" ")
    ends = how not in ("made", "killed") and float(seconds) > 0.8 * MAKING_LIMIT_S
    return _line("making", f"non-blocking raises after {MAKING_LIMIT_S} s", said, ok=ends)


def death(device: str) -> Line:
    """How long a killed process keeps its device memory, and whether another can start at once."""
    num_bytes = 2 * _at_most(BYTES[device], device, share=1 / 3)
    command = [sys.executable, "-c", HOLDER, device, str(num_bytes)]
    process = subprocess.Popen(tied(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "held\n":
        process.communicate()
        said = f"the process that was to hold {num_bytes / 2**30:.2f} GiB ended before it did"
        return _line("death", "memory comes back", said, ok=False)
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


def sticky(device: str) -> Line:
    """After a device assert every call of the process fails; a fresh process works."""
    first, _, following = _child(STICKY, [device], limit_s=30).partition(" ")
    fresh = _child("import torch, sys; print(torch.ones(1, device=sys.argv[1]).item())", [device])
    found = f"the assert: {first}; the next call: {following}; a fresh process: {fresh}"
    wanted = following != "works" if device == "cuda" else following == "works"
    expected = "the next call fails" if device == "cuda" else "the next call works"
    ok = wanted and first != "works" and fresh == "1.0"
    return _line("sticky", f"{expected}, a fresh process works", found, ok=ok)


def stall(device: str) -> Line:
    """The checkpoint's stage: state to pinned memory, and read back."""
    from paceline.runtime.checkpoint._staging import Stage

    num_bytes = _at_most(BYTES[device], device, share=1 / 3)
    num = num_bytes // 4 // 8
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
    rate = num_bytes / times[1]
    found = f"{num_bytes / 2**30:.2f} GiB at {rate / 1e9:.1f} GB/s, first {times[0]:.2f} s"
    fast = rate > 20e9 if device == "cuda" else True
    return _line("stall", "over 20 GB/s, values right", found, ok=right and fast)


NEWER_NCCL = "pip install --no-deps 'nvidia-nccl-cu{}>=2.30' puts it in the place of torch's"


def two_ranks(device: str) -> Line:
    """Two ranks of NCCL on one GPU, where it can: faults in whole runs, and SHA-256 compared."""
    if device != "cuda":
        return Line(name="two-ranks", expected="-", found="a CPU has no NCCL", verdict="not run")
    version = tuple(torch.cuda.nccl.version())
    if version < (2, 30):
        known = ".".join(str(part) for part in version)
        cuda = (torch.version.cuda or "13").partition(".")[0]
        found = f"NCCL is {known}: two ranks share a GPU from 2.30 on, {NEWER_NCCL.format(cuda)}"
        return Line(name="two-ranks", expected="-", found=found, verdict="not run")
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
    said = _pair(SUM, device, "nccl", env=env, limit_s=40)
    if said != ["3.0", "3.0"]:
        found = f"no all_reduce: {'; '.join(said)}"
        return _line("two-ranks", "an all_reduce gives 3.0", found, ok=False)
    os.environ.update(env)
    checks = list(drills("tests.gpu.fork_server"))
    found = "; ".join(f"{each.name} {each.status}: {each.found}" for each in checks)
    ok = all(each.status == "pass" for each in checks)
    return _line("two-ranks", "the undisturbed SHA-256 after every fault", found, ok=ok)


def drills(fork_server: str, names: Iterable[str] | None = None) -> Iterator[Check]:
    """The faults in runs of two ranks, whose workers come from this fork server."""
    os.environ["PACELINE_FORK_SERVER"] = fork_server
    for name in names or DRILLS:
        optimizer, steps, faults = DRILLS[name]
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


def gloo_on_gpu(device: str) -> Line:
    """Paceline's own recovery over gloo with the device's tensors: kills, a hang, one SHA-256."""
    os.environ["PACELINE_KIT_DEVICE"] = device
    (check,) = drills("tests.gpu.gloo_fork_server", ["kills and a stop"])
    expected = "the undisturbed SHA-256 after every fault"
    return _line("gloo-on-gpu", expected, check.found, ok=check.status == "pass")


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
    num = _at_most(GUARDED[device], device, bytes_each=4, share=2 / 3) // 16
    tensors = [torch.ones(num, device=device) for _ in range(16)]
    names = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    seconds = median_s(lambda: fingerprint(iter(names)), where)
    found = f"{16 * num / 1e9:.2g} billion parameters in {1000 * seconds:.1f} ms"
    return _line("guard", "below 1 % of a step at the chosen interval", found)


def narrow(device: str) -> Line:
    """Products in bf16 and in float8 against float64, and training in both."""
    from paceline.runtime.strategy.fp8 import product

    torch.manual_seed(0)
    left, right = torch.randn(256, 512, device=device), torch.randn(128, 512, device=device)
    exact = (left.cpu().double() @ right.cpu().double().T).norm()
    has_float8 = device != "cuda" or torch.cuda.get_device_capability() >= (8, 9)
    errors, losses = {}, {}
    for name, times, most in (
        ("bf16", lambda a, b: a @ b.T, 2**-7),
        ("fp8", product, 2**-4),
    )[: 1 + has_float8]:
        found = times(left.bfloat16(), right.bfloat16()).cpu().double()
        off = (found - left.cpu().double() @ right.cpu().double().T).norm() / exact
        errors[name] = (float(off), most)
        losses[name] = _trained(name, device)
    said = ", ".join(
        f"{name}: off by {off:.2%}, loss {losses[name][0]:.3f} to {losses[name][1]:.3f}"
        for name, (off, _) in errors.items()
    )
    said += "" if has_float8 else "; float8 needs compute capability 8.9"
    ok = all(off < most for off, most in errors.values())
    ok = ok and all(last < 0.9 * first for first, last in losses.values())
    return _line("narrow", "off by rounding (0.8 %, 6 %), and the loss falls", said, ok=ok)


def _trained(precision: str, device: str) -> tuple[float, float]:
    """The first and the last loss of a few steps of a small decoder on one batch."""
    from paceline.runtime.strategy.fp8 import use_float8

    model, step = _small_decoder(device)
    if precision == "fp8":
        use_float8(model)
    losses = [step() for _ in range(12)]
    return losses[0], losses[-1]


def compiled(device: str) -> Line:
    """One compiled graph for all blocks, and the time of the first step."""
    from torch._dynamo.utils import counters

    from paceline.runtime.strategy.compiling import compile_blocks

    # Not under `torch.device`, as the layouts are: the compiler breaks graphs at that mode.
    model, step = _small_decoder(device, layers=4 if device == "cpu" else 16)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compile_blocks(model, device_type=device, backend=backend)
    began = time.monotonic()
    step()
    first_s = time.monotonic() - began
    seconds = median_s(step, torch.device(device))
    graphs = counters["stats"]["unique_graphs"]
    found = f"{graphs} graphs, first step {first_s:.1f} s, then {1000 * seconds:.1f} ms"
    return _line("compile", "one graph for all blocks", found, ok=graphs == 1)


def _small_decoder(device: str, *, layers: int = 2) -> tuple[nn.Module, Callable[[], float]]:
    """A decoder of the runtime's, and what makes a step of it in bf16 and returns the loss."""
    from paceline.profile.shape import DecoderShape
    from paceline.runtime.decoder import Decoder

    torch.manual_seed(0)
    shape = DecoderShape(
        layers=layers, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=256,
        tied_embeddings=False,
    )  # fmt: skip
    model = Decoder(shape, 32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 256, (4, 33)).to(device)

    def step() -> float:
        with torch.autocast(device, torch.bfloat16):
            scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, step


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
    "narrow": narrow,
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
    from paceline.catalog import catalog_name

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
    left_out = [] if hasattr(PipelineStage, "_setup_forward_recv_info") else ["pipeline"]  # 2.11
    left_out += [] if find_spec("transformers") else ["experts"]
    names = [name for name in LAYOUTS if name.split()[0] not in left_out]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        proofs = {name: pool.submit(_proved, name, device) for name in names}
        for name in names:
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


def _at_most(wanted: int, device: str, *, share: float, bytes_each: int = 1) -> int:
    """As many as are wanted, or as fit into a share of the device's free memory; a multiple of
    128, so that sixteen tensors take equal parts of it."""
    if device == "cuda":
        wanted = min(wanted, int(share * _free_bytes(device)) // bytes_each)
    return wanted // 128 * 128


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
    env: Mapping[str, str],
    limit_s: float,
) -> list[str]:
    """What each of two ranks prints at last, or why it prints nothing."""
    limit_s *= CPU_PATIENCE if device == "cpu" else 1
    with TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                tied([sys.executable, "-c", program, device, backend, f"{folder}/store", rank]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **env},
            )
            for rank in ("0", "1")
        ]  # fmt: skip
        end, said = time.monotonic() + limit_s, []
        for process in processes:
            try:
                printed, why = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                printed, why = process.communicate()[0], f"nothing in {limit_s:.0f} s"
            nothing = f"no answer: {(why.strip().splitlines() or ['it ended'])[-1]}"
            said.append((printed.strip().splitlines() or [nothing])[-1])
        return said
