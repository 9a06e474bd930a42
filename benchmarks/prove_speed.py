"""How long `paceline prove` takes, as whole processes, and whether few blocks stand for all.

    .venv/bin/python benchmarks/prove_speed.py [n]          # every job n times, 3 when left out
    .venv/bin/python benchmarks/prove_speed.py --whole      # each once more with every block traced
    .venv/bin/python benchmarks/prove_speed.py --estimates  # the planner's bytes beside the proofs'
    .venv/bin/python benchmarks/prove_speed.py --random SEED N  # bytes, seconds; random layouts
    .venv/bin/python benchmarks/prove_speed.py --networks [held]  # seconds, four networks

Wall time from the start of the process to its end, with the imports of torch. The largest memory is
that of the larger of the two processes, the command and its helper.

`--whole` takes minutes a job. `--estimates` has 28 blocks of eight families in usual layouts; those
marked `held` were put away before the estimate was last changed. `--random` draws a model of eight
families and a layout, every degree, schedule and policy alike, and has a summary for even numbers,
which the estimate was worked on with, and odd ones. `--networks` has 14 jobs on four networks; its
half `held` was put away before messages between stages were last changed. Seconds are without
stragglers, which no proof has.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from figures import machine, spread

from paceline.errors import PacelineError
from paceline.estimate import case_of, price_one, stage_memory
from paceline.job import parse_job
from paceline.parallel import Layout
from paceline.parallel.candidates import candidates
from paceline.plan.search_inputs import space_of
from paceline.profile import resolve_decoder, resolve_profile
from paceline.prove.proof import ModelRequest, Request
from paceline.prove.prove import prove
from paceline.topology import find_cluster

COMMON = "data: {corpus: python-stdlib, seq_len: 8192}"
JOBS = {
    "8B, FSDP2 over 64": (
        "llama-3-8b", 8, 64, "tensor: 1, pipeline: 1, context: 1, recompute_every: 1", 5,
    ),
    "70B, FSDP2 over 32 x tensor 8": (
        "llama-3-70b", 32, 256, "tensor: 8, pipeline: 1, context: 1, recompute_every: 1", 8,
    ),
    "405B, FSDP2 over 128 x tensor 8": (
        "llama-3-405b", 128, 1024, "tensor: 8, pipeline: 1, context: 1, recompute_every: 1", 8,
    ),
    "70B, pipeline 8 interleaved x FSDP2 over 4 x tensor 8": (
        "llama-3-70b", 32, 128,
        "tensor: 8, pipeline: 8, schedule: interleaved, chunks: 2, context: 1, recompute_every: 1",
        15,
    ),
    "Mixtral 8x7B, FSDP2 over 64 x experts 8": (
        "mixtral-8x7b", 8, 64,
        "tensor: 1, expert: 8, pipeline: 1, context: 1, recompute_every: 1", 10,
    ),
}  # fmt: skip
"""Preset, nodes of 8 H100, samples in a batch, what the layout fixes, and the bar in seconds."""


def _config(kind: str, architecture: str, seq_len: int, **sizes: Any) -> tuple[int, dict[str, Any]]:
    """Tokens of a sample, and a config.json."""
    usual = {"vocab_size": 32000, "max_position_embeddings": 8192}
    return seq_len, {"model_type": kind, "architectures": [architecture], **usual, **sizes}


def _sizes(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        **more,
    }


_GPT2 = {"n_embd": 768, "n_layer": 8, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
_GPT2["max_position_embeddings"] = 1024
_OPT = {"ffn_dim": 8192, "vocab_size": 50272, "word_embed_proj_dim": 2048}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
_QWEN = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "head_dim": 64}
MODELS = {
    "gpt2": _config("gpt2", "GPT2LMHeadModel", 1024, **_GPT2),
    "opt": _config("opt", "OPTForCausalLM", 2048, **_sizes(6, 2048, 32, 8192), **_OPT),
    "gpt_neox": _config("gpt_neox", "GPTNeoXForCausalLM", 2048, **_sizes(6, 2048, 16, 8192)),
    "llama": _config(
        "llama", "LlamaForCausalLM", 4096, **_sizes(8, 2048, 32, 8192, num_key_value_heads=8)
    ),
    "qwen3": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        4096,
        **_sizes(8, 1024, 16, 3072, num_key_value_heads=8, head_dim=128),
    ),
    "gemma2": _config(
        "gemma2",
        "Gemma2ForCausalLM",
        4096,
        **_sizes(6, 2304, 8, 9216, num_key_value_heads=4, head_dim=256),
    ),
    "mixtral": _config(
        "mixtral", "MixtralForCausalLM", 2048, **_sizes(6, 1024, 16, 3584), **_MIXTRAL
    ),
    "qwen3_moe": _config(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        2048,
        **_sizes(6, 1024, 16, 3072, num_key_value_heads=4),
        **_QWEN,
    ),
}
FSDP: dict[str, Any] = {"sharding": "full", "data": 8}
SPLIT: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
STAGES: dict[str, Any] = {"accumulation": 8, "schedule": "1f1b"}
BLOCKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gpt2", "", {"data": 8, "micro_batch": 8}),
    ("gpt2", "held", {**FSDP, "micro_batch": 8}),
    ("gpt2", "held", {"data": 8, "micro_batch": 4, "accumulation": 4}),
    ("gpt2", "", {**FSDP, "micro_batch": 8, "recompute": "selective"}),
    ("gpt2", "", {**STAGES, "micro_batch": 2, "pipeline": 4}),
    ("gpt2", "held", {**SPLIT, "micro_batch": 8}),
    ("llama", "", {"data": 8}),
    ("llama", "held", {**FSDP, "accumulation": 4}),
    ("llama", "", {**FSDP, **SPLIT, "data": 4}),
    ("llama", "held", {**STAGES, "pipeline": 4}),
    ("llama", "", {**STAGES, "pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    ("llama", "held", {**FSDP, "data": 4, "context": 2, "context_kind": "ring"}),
    ("qwen3", "", FSDP),
    ("qwen3", "held", {"data": 8}),
    ("qwen3", "held", {**SPLIT, "recompute": "full"}),
    ("qwen3", "", {**FSDP, "data": 4, "context": 2, "context_kind": "ulysses"}),
    ("mixtral", "", {"data": 8}),
    ("mixtral", "held", {**FSDP, "expert": 2}),
    ("qwen3_moe", "", {**FSDP, "expert": 4}),
    ("qwen3_moe", "held", {"data": 8}),
    ("gemma2", "", FSDP),
    ("gemma2", "held", {"data": 8}),
    ("opt", "", {"data": 8, "micro_batch": 2}),
    ("gpt_neox", "held", {**FSDP, "micro_batch": 2}),
    ("qwen3", "", {**FSDP, "recompute": "full"}),
    ("opt", "held", {**STAGES, "accumulation": 4, "pipeline": 2}),
    ("mixtral", "", SPLIT),
    ("qwen3_moe", "held", {**FSDP, "recompute": "selective"}),
)
"""Model, whether it was put away, and what its layout sets, on nodes of 8 H100 in bf16."""


def _print_estimates() -> None:
    """Bytes of tensors of the fullest rank, counted by the estimate and by the proof."""
    errors: dict[str, list[float]] = {"": [], "held": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, half, given in BLOCKS:
            of = Layout(
                **{"data": 1, "sharding": "none", "micro_batch": 1, "accumulation": 1} | given
            )
            estimated, proved = _bytes_of_both(*MODELS[name], of, Path(folder))
            errors[half].append(estimated / proved - 1)
            sizes = f"{estimated / 2**20:>8,.0f}{proved / 2**20:>8,.0f} MiB"
            recompute = "" if of.recompute == "none" else f", recompute {of.recompute}"
            print(f"{name:<11}{half:<6}{sizes}{errors[half][-1]:>+8.1%}  {of.name}{recompute}")
    for half, each in errors.items():
        off = [abs(error) for error in each]
        print(f"{half or 'others'}: n {len(off)}, median {median(off):.1%}, worst {max(off):.1%}")


def _bytes_of_both(
    seq_len: int, config: dict[str, Any], of: Layout, folder: Path
) -> tuple[float, float]:
    job = _small_job(seq_len, config, folder)
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    shape = resolve_decoder(job)
    model = ModelRequest(config=config) if shape is None else ModelRequest(decoder=shape)
    proof = prove(Request(model=model, layout=of, seq_len=seq_len, precision="bf16"))
    stages = stage_memory(of, case) if of.pipeline > 1 else [price_one(of, case).memory]
    return max(each.allocated_bytes for each in stages), proof.fullest.peak_bytes


def _small_job(
    seq_len: int,
    config: dict[str, Any],
    folder: Path,
    nodes: int = 1,
    batch: int = 64,
    of: str = "{}",
    network: str = "",
) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    links = f", network: {network}" if network else ""
    text = (
        f"model: {{hf_config: config.json}}\ndata: {{path: x, seq_len: {seq_len}}}\n"
        f"cluster: {{accelerator: H100-SXM, nodes: {nodes}, per_node: 8{links}}}\n"
        f"train: {{global_batch: {batch}, steps: 100}}\nlayout: {of}\n"
    )
    return parse_job(text, source="job.yaml", folder=folder)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "sharding": ("none", "zero1", "zero2", "full", "hybrid"),
    "tensor": (1, 2, 4),
    "context": (1, 1, 2, 4),
    "context_kind": ("ring", "ulysses"),
    "recompute": ("none", "selective", "full"),
    "micro_batch": (1, 2),
}
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe-v")


@dataclass(frozen=True)
class Drawn:
    """One random case: bytes of the fullest rank and seconds of a step, estimated over proved."""

    number: int
    name: str
    of: Layout
    memory: float
    seconds: float | None


def drawn(seed: int, count: int, folder: Path) -> Iterator[Drawn]:
    """Random layouts of random models that the search would look at as well."""
    draw, number = Random(seed), 0
    while number < count:
        found = _draw(draw, folder)
        if found is None:
            continue
        name, job, config, of = found
        number += 1
        try:
            yield Drawn(number, name, of, *_both(job, config, of))
        except PacelineError as error:
            print(f"{number} {name} {of.name}: {error}")


def _draw(draw: Random, folder: Path) -> tuple[str, Any, dict[str, Any], Layout] | None:
    name = draw.choice(sorted(MODELS))
    seq_len, config = MODELS[name]
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config = {**config, layers: draw.choice((8, 12, 16))}
    fixed = {key: draw.choice(values) for key, values in _CHOICES.items()}
    fixed["pipeline"], schedule = draw.choice((1, 2, 4)), draw.choice(_SCHEDULES)
    fixed |= {"schedule": schedule} if fixed["pipeline"] > 1 else {}
    expert = draw.choice((1, 2, 4))
    fixed |= {"expert": expert} if "moe" in name or name == "mixtral" else {}
    nodes, batch = draw.choice((1, 2)), draw.choice((16, 32))
    job = _small_job(seq_len, config, folder, nodes, batch, json.dumps(fixed))
    cluster = find_cluster(job.spec.cluster, job)
    open_ones = candidates(space_of(job, cluster, resolve_profile(job)))
    if not len(open_ones):
        return None
    return name, job, config, open_ones.row(draw.randrange(len(open_ones)))


def _both(job: Any, config: dict[str, Any], of: Layout) -> tuple[float, float | None]:
    """Estimated over proved: bytes of the fullest rank, and seconds."""
    estimate, stages, proof = _estimated_and_proved(job, config, of)
    living = max(each.allocated_bytes - (each.parts["checkpoint"] or 0) for each in stages)
    memory = living / proof.fullest.peak_bytes
    if proof.simulated is None:
        return memory, None
    return memory, _without_stragglers(estimate) / proof.simulated.step_s


def _estimated_and_proved(job: Any, config: dict[str, Any], of: Layout) -> tuple[Any, Any, Any]:
    """The estimate, its memory by stage, and the proof."""
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    shape = resolve_decoder(job)
    model = ModelRequest(config=config) if shape is None else ModelRequest(decoder=shape)
    seq_len = job.spec.data.seq_len
    asked = Request(model=model, layout=of, seq_len=seq_len, precision="bf16", rates=case.rates)
    estimate = price_one(of, case)
    stages = stage_memory(of, case) if of.pipeline > 1 else [estimate.memory]
    return estimate, stages, prove(asked)


def _without_stragglers(estimate: Any) -> float:
    return float(sum(estimate.terms.values()) - estimate.terms["stragglers"])


def _print_random(seed: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = list(drawn(seed, count, Path(folder)))
    for each in sorted(found, key=lambda one: -max(map(abs, _off(one)))):
        errors = "".join(f"{error:>+8.1%}" for error in _off(each))
        of = each.of
        print(
            f"{each.number:>4} {each.name:<10}{errors}  {of.name}, {of.accumulation} x "
            f"{of.micro_batch}, recompute {of.recompute}, {of.context_kind}"
        )
    for half, rest in (("even", 0), ("odd", 1)):
        mine = [_off(each) for each in found if each.number % 2 == rest]
        for index, what in enumerate(("memory", "seconds")):
            off = [abs(each[index]) for each in mine if len(each) > index]
            print(f"{half} {what}: n {len(off)}, median {median(off):.1%}, worst {max(off):.1%}")


NETWORKS = ("10Gb/s", "25Gb/s", "100Gb/s", "400Gb/s InfiniBand")
_LOOP: dict[str, Any] = {**STAGES, "schedule": "interleaved", "chunks": 2, "pipeline": 4}
_HALVES: dict[str, Any] = {**STAGES, "schedule": "zero-bubble", "pipeline": 4}
_RING: dict[str, Any] = {"context": 16, "context_kind": "ring", "accumulation": 4}
_WIDE = _sizes(16, 4096, 32, 14336, num_key_value_heads=8)
_LINKED_MODELS = {**MODELS, "wide": _config("llama", "LlamaForCausalLM", 4096, **_WIDE)}
LINKED: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama", "", 2, {"data": 16, "accumulation": 2}),
    ("llama", "held", 2, {**FSDP, "data": 16, "accumulation": 2}),
    ("qwen3", "", 8, {**FSDP, "data": 64, "accumulation": 4}),
    ("wide", "held", 4, {**SPLIT, "tensor": 8, "data": 4, "sharding": "zero1"}),
    ("llama", "", 2, {**STAGES, **SPLIT, "tensor": 4, "pipeline": 4}),
    ("wide", "held", 4, {**STAGES, **SPLIT, **FSDP, "tensor": 4, "pipeline": 4, "data": 2}),
    ("llama", "", 2, {**_LOOP, **SPLIT, "tensor": 4}),
    ("wide", "held", 4, {**_LOOP, **SPLIT, "tensor": 4, "data": 2, "sharding": "zero1"}),
    ("wide", "", 4, {**_HALVES, **FSDP}),
    ("wide", "held", 4, {**_HALVES, "chunks": 2, "data": 8}),
    ("llama", "", 2, {**_RING, "sharding": "full"}),
    ("qwen3", "held", 2, {**_RING, "context_kind": "ulysses", "sharding": "full"}),
    ("wide", "", 8, {**STAGES, **FSDP, "pipeline": 8}),
    ("gpt2", "held", 1, {**STAGES, "pipeline": 8}),
)
"""Model, whether it was put away, nodes of 8 H100, and what its layout sets, in bf16."""


def _print_networks(half: str) -> None:
    print(f"estimated over simulated seconds of a step; {machine()}")
    offs: dict[str, list[float]] = {network: [] for network in NETWORKS}
    with tempfile.TemporaryDirectory() as folder:
        for name, held, nodes, given in LINKED:
            if held != half:
                continue
            of = Layout(
                **{"data": 1, "sharding": "none", "micro_batch": 1, "accumulation": 1} | given
            )
            shown = []
            for network in NETWORKS:
                job = _small_job(*_LINKED_MODELS[name], Path(folder), nodes, network=network)
                estimate, _, proof = _estimated_and_proved(job, _LINKED_MODELS[name][1], of)
                estimated, proved = _without_stragglers(estimate), proof.simulated.step_s
                offs[network].append(100 * (estimated / proved - 1))
                shown.append(f"{estimated:7.3f}/{proved:7.3f}{offs[network][-1]:+6.1f} %")
            print(f"{name:<6}{nodes:>2} x 8 {'  '.join(shown)}  {of.name}, {of.sharding}")
    for network, each in offs.items():
        print(f"{network}: {spread(each, '%', 1)}")


def _off(each: Drawn) -> list[float]:
    return [ratio - 1 for ratio in (each.memory, each.seconds) if ratio is not None]


def main() -> None:
    """Prove every job, and print what it took."""
    if "--estimates" in sys.argv:
        _print_estimates()
        return
    if "--random" in sys.argv:
        _print_random(*map(int, sys.argv[2:4]))
        return
    if "--networks" in sys.argv:
        _print_networks("held" if "held" in sys.argv else "")
        return
    whole = "--whole" in sys.argv
    counts = [argument for argument in sys.argv[1:] if argument.isdigit()]
    num_runs = int(counts[0]) if counts else 1 if whole else 3
    print(f"measured; {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in JOBS.items():
            job = Path(folder) / "job.yaml"
            job.write_text(_job(*parts[:4]))
            runs = [_prove(job) for _ in range(num_runs)]
            taken = [seconds for _, seconds, _ in runs]
            proof = runs[-1][0]
            print(f"{name} (bar {parts[4]} s)")
            print(f"  wall {spread(taken)}, largest process {max(r for *_, r in runs):.0f} MiB")
            _print_stages(proof)
            if whole:
                _compare(proof, *_prove(job, "--whole"))


def _job(preset: str, nodes: int, batch: int, layout: str) -> str:
    fixed = f"sharding: full, recompute: full, micro_batch: 1, {layout}"
    return "\n".join(
        (
            "name: proved",
            f"model: {{preset: {preset}}}",
            COMMON,
            f"cluster: {{accelerator: H100-SXM, nodes: {nodes}, per_node: 8}}",
            f"train: {{global_batch: {batch}, steps: 1000}}",
            f"layout: {{{fixed}}}",
        )
    )


def _prove(job: Path, *options: str) -> tuple[dict[str, Any], float, float]:
    """The proof, seconds of the whole process, and MiB of its largest one."""
    command = [sys.executable, "-m", "paceline", "prove", str(job), "--json", *options]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - started
    if not printed:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read().decode())
    process.returncode = os.waitstatus_to_exitcode(status)  # 3 says that it does not fit
    return json.loads(printed)["proof"], taken, usage.ru_maxrss / 1024


def _print_stages(proof: dict[str, Any]) -> None:
    stages = proof["stages"]
    peaks = ", ".join(f"{stage['peak_bytes']:,}" for stage in stages)
    print(f"  peak bytes {peaks}")
    for how in dict.fromkeys(stage["how"] for stage in stages):
        print(f"  {how}")


def _compare(proof: dict[str, Any], whole: dict[str, Any], seconds: float, _: float) -> None:
    """Each rank's peak beside that of the whole trace."""
    print(f"  traced whole in {seconds:.1f} s")
    for few, all_of_them in zip(proof["stages"], whole["stages"], strict=True):
        one, other = few["peak_bytes"], all_of_them["peak_bytes"]
        print(f"    rank {few['rank']}: {one:,} and {other:,} bytes, {one / other - 1:+.4%}")


if __name__ == "__main__":
    main()
