"""Reads published measurements (`published_calibration.csv`) into what `paceline.estimate` takes.

One row of the file is one row of every column here, so that thousands of runs of different models
on different machines are priced in one call. What a source does not state is marked as unknown and
left to the planner's own defaults; nothing is looked up by the name of a source.
"""

import csv
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from published_notes import Stated, stated_in

from paceline.catalog.engines import Engine, find_engine
from paceline.profile.block import Block

GIB = 2**30

# Facts about published models that the file has no column for: a part of the model's name (lower
# case) -> sizes. Source: their config.json.
_MODEL_FACTS: tuple[tuple[str, dict[str, float]], ...] = (
    (
        "deepseek-v3",
        {
            "heads": 128,
            "kv_heads": 128,
            "head_dim": 192,
            "value_dim": 128,
            "query_rank": 1536,
            "kv_rank": 512,
            "rope_dim": 64,
            "dense_layers": 3,
            "shared_ffn": 2048,
            "mtp": 1,
        },
    ),
    (
        "deepseek-v2-lite",
        {
            "heads": 16,
            "kv_heads": 16,
            "head_dim": 192,
            "value_dim": 128,
            "query_rank": 0,
            "kv_rank": 512,
            "rope_dim": 64,
            "dense_layers": 1,
            "shared_ffn": 2816,
        },
    ),
    (
        "deepseek-v2",
        {
            "heads": 128,
            "kv_heads": 128,
            "head_dim": 192,
            "value_dim": 128,
            "query_rank": 1536,
            "kv_rank": 512,
            "rope_dim": 64,
            "dense_layers": 1,
            "shared_ffn": 3072,
        },
    ),
    (
        "kimi-k2",
        {
            "heads": 64,
            "kv_heads": 64,
            "head_dim": 192,
            "value_dim": 128,
            "query_rank": 1536,
            "kv_rank": 512,
            "rope_dim": 64,
            "dense_layers": 1,
            "shared_ffn": 2048,
        },
    ),
    (
        "moonlight",
        {
            "heads": 16,
            "kv_heads": 16,
            "head_dim": 192,
            "value_dim": 128,
            "query_rank": 0,
            "kv_rank": 512,
            "rope_dim": 64,
            "dense_layers": 1,
            "shared_ffn": 2816,
        },
    ),
    ("qwen3-30b", {"head_dim": 128}),
    ("qwen3-235b", {"head_dim": 128}),
    ("qwen3-next", {"head_dim": 256, "shared_ffn": 512}),
    ("qwen3", {"head_dim": 128}),
    ("gpt-oss", {"head_dim": 64}),
    ("llama4", {"shared_ffn": 8192}),
    ("llama-4", {"shared_ffn": 8192}),
    ("mixtral", {"head_dim": 128}),
    ("gemma-7b", {"head_dim": 256}),
    ("gemma", {"head_dim": 256}),
    ("nemotron4-340b", {"head_dim": 192}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published measurement. None is not stated."""

    id: str
    source: str
    year: int
    model_name: str
    notes: str
    task: str
    blocks: tuple[Block, ...]
    seq_len: int
    hidden: int
    vocab: int
    tied: bool
    num_parameters: float | None
    accelerator: str
    num_ranks: int
    per_node: int
    interconnect: str
    engine: Engine
    framework: str
    sharding: str
    shard: int | None
    tensor: int
    sequence_parallel: bool
    pipeline: int
    chunks: int | None
    context: int
    context_kind: str
    expert: int
    expert_stated: bool
    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None
    precision: str
    recompute: str | None
    recompute_modules: str
    offload: str
    is_compiled: bool
    is_eager: bool
    """Whether the source says that it was not compiled."""
    step_s: float | None
    tokens_per_s: float | None
    """A rank's."""
    mfu: float | None
    """As printed, by the source's own definition."""
    source_size: int
    """Rows of the same source."""
    peak_bytes: float | None
    metric: str
    """What `peak_bytes` counts: allocated, reserved or device (nvidia-smi)."""
    adapter_parameters: float | None
    quantized_bits: int | None
    stated: Stated
    """What its notes say of kernels, types, schedule and optimizer."""

    @property
    def data(self) -> int:
        return max(1, self.num_ranks // (self.tensor * self.pipeline * self.context))


@dataclass(slots=True)
class Reading:
    """Rows that could be read, and why the others could not."""

    runs: list[Run] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def read(path: Path) -> Reading:
    """Every row of a file in the columns of `published_calibration.csv`."""
    reading = Reading()
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = defaultdict(str, {key: value or "" for key, value in line.items() if key})
            run = _run(row)
            if isinstance(run, str):
                reading.left_out.append((row["id"], run))
            else:
                reading.runs.append(run)
    sizes = Counter(run.source for run in reading.runs)
    reading.runs = [replace(run, source_size=sizes[run.source]) for run in reading.runs]
    return reading


def _run(row: dict[str, str]) -> Run | str:
    name, notes = row["model_name"], row["notes"]
    sizes = _sizes(row)
    if isinstance(sizes, str):
        return sizes
    blocks, hidden, vocab, tied = sizes
    engine = _engine_of(row)
    precision = _precision(row)
    if precision is None:
        return f"the precision `{row['precision']}` is not one we price"
    seq_len = _int(row["seq_len"])
    if seq_len is None:
        return "the sequence length is not stated"
    num_ranks = _int(row["n_gpus"])
    if num_ranks is None:
        return "the number of accelerators is not stated"
    tensor, pipeline = _int(row["TP"]) or 1, _int(row["PP"]) or 1
    context = _int(row["CP"]) or 1
    if "device_map layer split" in notes:
        pipeline, tensor = num_ranks, 1
    if tensor * pipeline * context > num_ranks:
        return f"tensor x pipeline x context is more than its {num_ranks} accelerators"
    data = max(1, num_ranks // (tensor * pipeline * context))
    batch, micro = _int(row["global_batch"]), _int(row["micro_batch"])
    accumulation = _int(row["grad_accum"])
    if batch and micro:
        accumulation = max(1, round(batch / (data * micro)))
    tokens = _float(row["tokens_per_s_per_gpu"])
    step = _float(row["step_time_s"])
    if step is None and tokens and batch:
        step = batch * seq_len / (tokens * num_ranks)
    zero = re.search(r"zero1=(\d+)", notes) or re.search(r"zero1 group size (\d+)", notes)
    hybrid = re.search(r"ici_fsdp=(\d+) x dcn_data_parallelism=(\d+)", notes)
    shard = int(hybrid[1]) if hybrid else int(zero[1]) if zero else None
    checkpointed = _recompute(row, tokens)
    mem = _float(row["peak_mem_gib"])
    modules = re.search(r"recompute_modules=([\w+\[\]]+)", notes)
    quant = re.search(r"quant=(\w+)", notes)
    trainable = re.search(r"trainable params ([\d,]+)", notes)
    return Run(
        id=row["id"],
        source=row["id"].rsplit("-", 1)[0],
        year=_int(row["year"]) or 2024,
        model_name=name,
        notes=notes,
        task=(re.search(r"task=(\w+)", notes) or ["", "pretrain"])[1],
        blocks=blocks,
        seq_len=seq_len,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        num_parameters=(_float(row["n_params_b"]) or 0) * 1e9 or None,
        accelerator=row["accelerator"],
        num_ranks=num_ranks,
        per_node=_int(row["gpus_per_node"]) or min(8, num_ranks),
        interconnect=row["interconnect"],
        engine=engine,
        framework=row["framework"],
        sharding=_sharding(row, engine),
        shard=shard,
        tensor=tensor,
        sequence_parallel=_is_sequence_parallel(row, engine),
        pipeline=pipeline,
        chunks=_int(row["virtual_pp"]),
        context=context,
        context_kind="ulysses" if "lysses" in notes else "ring",
        expert=_int(row["EP"]) or 1,
        expert_stated=bool(row["EP"]),
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=batch,
        precision=precision,
        recompute=checkpointed,
        recompute_modules=modules[1] if modules else "",
        offload=row["offload"],
        is_compiled=_is_true(row["torch_compile"]),
        is_eager=row["torch_compile"].strip().lower() in ("0", "false", "no"),
        step_s=step,
        tokens_per_s=tokens,
        mfu=(_float(row["mfu"]) or 0.0) if row["mfu"] else None,
        source_size=0,
        peak_bytes=mem * GIB if mem else None,
        metric=_metric(notes),
        adapter_parameters=_float(trainable[1]) if trainable else None,
        quantized_bits=_quantized(quant[1] if quant else "", notes),
        stated=stated_in(row),
    )


def _sizes(row: dict[str, str]) -> tuple[tuple[Block, ...], int, int, bool] | str:
    name = row["model_name"].lower()
    layers, hidden = _int(row["n_layers"]), _int(row["hidden"])
    if "mamba" in name or "nemotron v3" in name or "nemotron-3" in name:
        return "a hybrid with Mamba blocks, which no block of ours describes"
    if not layers or not hidden:
        return "the model's sizes are not stated"
    facts = next((facts for part, facts in _MODEL_FACTS if part in name), {})
    heads = int(facts.get("heads", 0)) or _int(row["n_heads"])
    if not heads:
        heads = max(1, hidden // 128)
    kv_heads = int(facts.get("kv_heads", 0)) or _int(row["n_kv_heads"]) or heads
    head_dim = int(facts.get("head_dim", 0)) or hidden // heads
    gated = _is_true(row["gated_mlp"])
    ffn = _int(row["ffn_hidden"])
    if not ffn:
        ffn = math.ceil(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden
    experts = _int(row["n_experts"]) or 0
    expert_ffn = _int(row["moe_ffn_hidden"]) or ffn
    common = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": int(facts.get("value_dim", 0)) or head_dim,
        "query_rank": int(facts.get("query_rank", 0)),
        "kv_rank": int(facts.get("kv_rank", 0)),
        "rope_dim": int(facts.get("rope_dim", 0)),
        "gated": gated,
        "vector_parameters": (2 if gated else 9) * hidden,
    }
    dense_layers = int(facts.get("dense_layers", 0)) if experts else layers
    if not experts:
        blocks = (Block(name="dense", count=layers, ffn=ffn, **common), _no_block(common))
    else:
        moe = Block(
            name="moe",
            count=layers - dense_layers + int(facts.get("mtp", 0)),
            experts=experts,
            experts_per_token=_int(row["top_k"]) or 1,
            expert_ffn=expert_ffn,
            shared_ffn=int(facts.get("shared_ffn", 0)),
            **common,
        )
        blocks = (Block(name="dense", count=dense_layers, ffn=ffn, **common), moe)
    vocab = _int(row["vocab"]) or 50_304
    return blocks, hidden, vocab, _is_true(row["tied_embeddings"])


def _no_block(common: dict[str, int]) -> Block:
    """A second kind with no blocks, so that every run has two kinds."""
    return Block(name="none", count=0, ffn=0, **common)


_ENGINES: tuple[tuple[str, str], ...] = (
    (r"megatron.?deepspeed|deepspeed.*megatron|neox", "megatron-deepspeed"),
    (r"automodel", "automodel"),
    (r"megatron.?bridge|nemo(?!tron)|mlperf", "megatron-bridge"),
    (r"mcore|megatron.?core|primus|rocm|amd|simumax|megascale|vescale|mindspeed", "megatron"),
    (r"megatron|vtrain|galvatron|alpa|aceso", "megatron"),
    (r"metaseq|fairseq", "megatron-2021"),
    (r"nanotron|picotron", "nanotron"),
    (r"internevo|internlm", "internevo"),
    (r"maxtext|jax|levanter|pathways|palm|pax|t5x|easylm|xla|tpu|neuron", "maxtext"),
    (r"torchtune", "torchtune"),
    (r"torchtitan|olmo|dolma", "torchtitan"),
    (r"composer|mosaic|llm.?foundry|lit.?gpt|fsdp ?1", "fsdp1"),
    (
        r"accelerate|hugging|transformers|swift|axolotl|trl|llama.?factory|unsloth|peft|optimum",
        "accelerate",
    ),
    (r"deepspeed|xtuner|colossal|bmtrain|hai.?llm", "deepspeed"),
)
"""Part of a framework's name -> engine of the catalog, first match wins."""


def _engine_of(row: dict[str, str]) -> Engine:
    """The engine that a framework's name says, of the version it says or of the row's year; else
    PyTorch's own, compiled where it says so.

    Megatron-LM has flash attention and its core since the end of 2022; Composer's FSDP is PyTorch's
    first.
    """
    name, year = row["framework"].lower(), _int(row["year"]) or 2024
    kind = next((engine for part, engine in _ENGINES if re.search(part, name)), None)
    if kind == "megatron" and year <= 2022 and not re.search(r"core|primus|amd|rocm", name):
        kind = "megatron-2021"
    if kind is None:
        kind = "torchtitan" if _is_true(row["torch_compile"]) else "paceline"
    version = re.search(r"[ v=@](\d+(?:\.\d+)+)", name)
    # A version is that of the program named: of Hugging Face's trainers it is not transformers'.
    is_own = version is not None and kind not in ("accelerate", "deepspeed")
    return find_engine(kind, version[1] if version is not None and is_own else "", year=year)


_SHARDINGS: tuple[tuple[str, str], ...] = (
    (r"hsdp|hybrid", "hybrid"),
    (r"zero[-_ ]?3|fsdp|full_?shard|stage[-_ ]?3", "full"),
    (r"zero[-_ ]?2|shard_?grad_?op|stage[-_ ]?2", "zero2"),
    (r"zero[-_ ]?1|distributed_?optim|dist_?opt|stage[-_ ]?1", "zero1"),
    (r"ddp|none|zero[-_ ]?0|^dp|data.?parallel|tp_only|horovod|^no$", "none"),
)


def _sharding(row: dict[str, str], engine: Engine) -> str:
    """What the data ranks share: as stated, by the tag in the notes, or what the engine does."""
    kind = row["data_parallel_kind"].lower()
    tag = re.search(r"zero_stage=(\d)", row["notes"])
    if not kind and tag:
        kind = f"zero{tag[1]}"
    stated = next((sharding for part, sharding in _SHARDINGS if re.search(part, kind)), None)
    name = row["framework"].lower()
    if stated is None and "ddp" in name:
        stated = "none"
    usual = {"megatron": "zero1", "megatron-bridge": "zero1", "megatron-2021": "none"}
    usual |= {"megatron-deepspeed": "zero1", "nanotron": "zero1", "internevo": "zero1"}
    sharding = stated or usual.get(engine.name, "full")
    # Between the stages of a pipeline nobody gathers for each micro-batch: parameters stay whole,
    # gradients are reduced with the last one, and what is shared is the optimizer's state.
    has_stages = (_int(row["PP"]) or 1) > 1
    return "zero1" if has_stages and sharding in ("zero2", "full") else sharding


def _is_sequence_parallel(row: dict[str, str], engine: Engine) -> bool:
    stated = row["sequence_parallel"].lower()
    if stated in ("0", "1", "true", "false", "yes", "no"):
        return _is_true(stated)
    return engine.name not in ("megatron-2021", "megatron-deepspeed", "deepspeed")


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


_PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"nvfp4|fp4", "nvfp4"),
    (r"fp8|float8|e4m3", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|half", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32|float32|single", "fp32"),
)


def _precision(row: dict[str, str]) -> str | None:
    text = row["precision"].lower()
    if not text:
        return "fp16" if "V100" in row["accelerator"] or "T4" in row["accelerator"] else "bf16"
    return next((kind for part, kind in _PRECISIONS if re.search(part, text)), None)


def _recompute(row: dict[str, str], tokens: float | None) -> str | None:
    text = row["activation_ckpt"].strip().lower()
    if not text or text in ("?", "unknown", "n/a"):
        return _inferred_recompute(row, tokens)
    if text in ("none", "no", "0", "off", "false"):
        return "none"
    # Every so many blocks, whole: torchtitan calls that selective too.
    if stated_in(row).recompute_every > 1:
        return "full"
    if re.search(r"select|attn|partial|core|op\b", text):
        return "selective"
    return "full"


def _inferred_recompute(row: dict[str, str], tokens: float | None) -> str | None:
    """Whole blocks are computed again where the printed hardware FLOPs are 4/3 of the model's."""
    mfu, hfu = _float(row["mfu"]), _float(row["hfu"])
    if mfu and hfu:
        return "full" if hfu / mfu > 1.2 else None
    printed = re.search(r"tflops_printed=([\d.]+)", row["notes"])
    if printed and tokens and row["n_params_b"] and "hardware" not in row["notes"]:
        model = 6e-3 * float(row["n_params_b"]) * tokens
        layers, hidden, seq = (_int(row[k]) or 0 for k in ("n_layers", "hidden", "seq_len"))
        model += 12e-12 * layers * hidden * seq * tokens
        return "full" if float(printed[1]) / model > 1.2 else None
    return None


def _metric(notes: str) -> str:
    if re.search(r"nvidia-smi|rocm-smi|nvml|metric not stated", notes, re.IGNORECASE):
        return "device"
    # What a program prints without saying which is nearer to what it has reserved.
    says_reserved = re.search(r"(?<!not )reserved", notes) and "not reserved" not in notes
    if says_reserved or "labelled GB" in notes:
        return "reserved"
    return "allocated"


def _quantized(quant: str, notes: str) -> int | None:
    if quant in ("int4", "nf4", "bnb") or "nf4" in quant or "fp4" in quant:
        return 4
    if quant in ("int8",) or "int8" in quant:
        return 8
    return None


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


def _float(text: str | None) -> float | None:
    """A number as people write them (`1,024`, `~64`, `8k`, `40%`); None where there is none."""
    found = re.match(r"[~<>≈ ]*(-?[\d,]*\.?\d+(?:e[+-]?\d+)?) ?([kKMB%]?)", text or "")
    if found is None:
        return None
    value = float(found[1].replace(",", ""))
    if not math.isfinite(value) or value <= 0:
        return None
    return value / 100 if found[2] == "%" else value * _UNITS.get(found[2].lower(), 1)


def _int(text: str | None) -> int | None:
    value = _float(text)
    return None if value is None or value < 1 else int(value)
