"""The model card of an exported folder: its README.md, as model hubs read it.

Leaves out: what only a person knows (what the model is for, its limits, its licence where the base
model names none); the card has a place for it.
"""

from collections.abc import Iterator, Mapping

from paceline.job.adapters import alpha_of
from paceline.job.data_rules import objective_of
from paceline.job.pretrained import Pretrained
from paceline.launch.export import Exported
from paceline.prepare import Index, TrainedOn
from paceline.prepare.trained_on import Prepared
from paceline.record.conversion import LogitsCheck
from paceline.record.events import Evaluated, RunStarted
from paceline.record.gather import RunRecord
from paceline.record.run import RunInfo
from paceline.report.table import markdown_table
from paceline.units import counted, format_bytes

_SETTINGS = (
    *("global_batch", "steps", "optimizer", "learning_rate", "warmup_steps", "schedule"),
    *("weight_decay", "clip_norm", "seed"),
)


def model_card(
    exported: Exported,
    record: RunRecord,
    info: RunInfo,
    data: TrainedOn | None,
    pretrained: Pretrained | None,
) -> str:
    """The card's text, in Markdown.

    Args:
        info: As `run.json` has it: what it trained on and started from.
        data: What it trained on; None where that is not there any more.
        pretrained: The weights that it started from.
    """
    parts = [
        "\n".join(_head(exported, record, pretrained)),
        f"# {record.name}",
        _what(exported, record, pretrained),
        "Intended use, limits: fill in.",
        f"## Load\n\n{_load(exported, record, pretrained)}",
        f"## Base model\n\n{_base(info, pretrained)}",
        f"## Data\n\n{_data(record, info, data)}",
        f"## Training\n\n{_training(exported, record)}",
        f"## Losses\n\n{_losses(exported, record)}",
        f"## Check\n\n{check_text(exported.check)}",
        f"## Files\n\n{_files(exported)}",
    ]
    return "\n\n".join(parts) + "\n"


def check_text(check: LogitsCheck) -> str:
    """What came of the comparison with the run's own model, in a sentence or two."""
    if check.not_made:
        return f"not made: {check.not_made}"
    assert check.largest_difference is not None, "a check that was made has numbers"
    libraries = ", ".join(f"{name} {version}" for name, version in check.versions.items())
    text = (
        f"loaded with {libraries}: logits of {counted(check.samples, 'sample')} ({check.kind}) "
        f"differ from the run's by at most {check.largest_difference:.2g} (largest logit "
        f"{check.largest_logit:.3g}); the most likely token is the same at "
        f"{check.same_choice:.1%} of positions"
    )
    if check.largest_rounding is not None:
        text += f"; rounding the weights changes logits by up to {check.largest_rounding:.2g}"
    return text


def _head(exported: Exported, record: RunRecord, pretrained: Pretrained | None) -> Iterator[str]:
    """The lines that a hub reads."""
    yield "---"
    if exported.licence is None:
        yield "# license: fill in"
    else:
        yield f"license: {exported.licence}"
    if pretrained is not None and pretrained.commit is not None:
        yield f"base_model: {pretrained.name}"
    yield f"library_name: {'peft' if exported.kind == 'adapters' else 'transformers'}"
    classifies = objective_of(record.spec) == "classification"
    yield f"pipeline_tag: text-{'classification' if classifies else 'generation'}"
    yield f"tags: [paceline{'' if exported.kind == 'model' else ', lora'}]"
    yield "---"


def _what(exported: Exported, record: RunRecord, pretrained: Pretrained | None) -> str:
    start = "from random weights" if pretrained is None else f"from {_name(pretrained)}"
    classifies = objective_of(record.spec) == "classification"
    kind = {
        "model": "A text classifier" if classifies else "A causal language model",
        "adapters": "LoRA adapters",
        "merged": "A causal language model with LoRA adapters merged into it",
    }[exported.kind]
    return f"{kind}, trained {start} for {exported.step} of {record.spec.train.steps} steps."


def _name(pretrained: Pretrained) -> str:
    return f"`{pretrained.name if pretrained.commit is not None else pretrained.folder.name}`"


def _load(exported: Exported, record: RunRecord, pretrained: Pretrained | None) -> str:
    has_tokenizer = any(each.endswith("/tokenizer.json") for each in exported.converted.files)
    classifies = objective_of(record.spec) == "classification"
    model = f"AutoModelFor{'SequenceClassification' if classifies else 'CausalLM'}"
    names = [model, *(["AutoTokenizer"] if has_tokenizer else [])]
    lines = [f"from transformers import {', '.join(names)}", ""]
    notes = ["`FOLDER` is the folder of this file."]
    if exported.kind == "adapters":
        base = "BASE"
        if pretrained is not None and pretrained.commit is not None:
            base = pretrained.name
        else:
            notes.append("`BASE` is the folder of the base model, which is named below.")
        lines.insert(0, "from peft import PeftModel")
        lines.append(f'base = AutoModelForCausalLM.from_pretrained("{base}")')
        lines.append('model = PeftModel.from_pretrained(base, "FOLDER")')
    else:
        lines.append(f'model = {model}.from_pretrained("FOLDER")')
    if has_tokenizer:
        lines.append('tokenizer = AutoTokenizer.from_pretrained("FOLDER")')
    else:
        notes.append("There is no tokenizer: tokens are bytes.")
    return "```python\n" + "\n".join(lines) + "\n```\n\n" + " ".join(notes)


def _base(info: RunInfo, pretrained: Pretrained | None) -> str:
    if pretrained is None:
        return "None: the weights were drawn at random."
    lines = [f"- {_name(pretrained)}"]
    if pretrained.commit is not None:
        lines.append(f"- commit {pretrained.commit}")
    lines.append(f"- SHA-256 of its config.json and weights: `{info.weights_digest or 'unknown'}`")
    return "\n".join(lines)


def _data(record: RunRecord, info: RunInfo, data: TrainedOn | None) -> str:
    told = f"Fingerprint of the data: `{info.data_fingerprint or 'unknown'}`."
    if data is None:
        return f"The data are not there any more. {told}"
    if not isinstance(data, Prepared):
        return (
            f"{counted(data.num_files, 'file')} of text, read as bytes: "
            f"{format_bytes(data.num_train_bytes)} to train on, "
            f"{format_bytes(data.num_held_out_bytes)} held out. {told}"
        )
    return f"{_sources(data.index)}\n\n{_treatment(record, data.index)} {told}"


def _sources(index: Index) -> str:
    rows: list[tuple[str, ...]] = [
        ("source", "", "weight", "documents", "tokens", "targets", "samples")
    ]
    for side, sources in (("training", index.train), ("held out", index.held_out)):
        rows += [
            (
                each.name,
                side,
                "by size" if each.weight is None else f"{each.weight:g}",
                *(f"{n:,}" for n in (each.documents, each.tokens, each.targets, each.samples)),
            )
            for each in sources
        ]
    return markdown_table(rows)


def _treatment(record: RunRecord, index: Index) -> str:
    left = "".join(
        f" Left out of {each.source}: {counted(each.documents, 'document')} ({each.reason})."
        for each in index.left_out
    )
    return (
        f"Kind `{record.spec.data.kind}`, samples of {index.seq_len} tokens, `{index.pack}`, "
        f"tokenizer `{index.tokenizer}`.{left}"
    )


def _training(exported: Exported, record: RunRecord) -> str:
    train = record.spec.train
    rows = [("setting", "value")]
    rows += [(name, str(getattr(train, name))) for name in _SETTINGS]
    rows.append(("data.seq_len", str(record.spec.data.seq_len)))
    if train.adapter is not None:
        rows.append(("adapter", _adapter(record)))
    if record.plan is not None:
        rows.append(("layout", record.plan.layout_name))
    precision = train.precision if record.plan is None else record.plan.precision
    rows.append(("precision of the products", precision))
    rows += [(name, version) for name, version in _versions(record, exported).items()]
    return markdown_table(rows)


def _adapter(record: RunRecord) -> str:
    spec = record.spec.train.adapter
    assert spec is not None, "asked where there is one"
    targets = spec.targets if isinstance(spec.targets, str) else ", ".join(spec.targets)
    scaling = "alpha / root of rank" if spec.scaling == "rslora" else "alpha / rank"
    return (
        f"{spec.kind}, rank {spec.rank}, alpha {alpha_of(spec):g}, multiplied by {scaling}, "
        f"targets {targets}, dropout {spec.dropout:g}"
    )


def _versions(record: RunRecord, exported: Exported) -> dict[str, str]:
    started = [event for event in record.events if isinstance(event, RunStarted)]
    return {**(started[-1].versions if started else {}), **exported.check.versions}


def _losses(exported: Exported, record: RunRecord) -> str:
    """Before and after, in training and by source of what is held out."""
    steps = {each.step: each.loss for each in record.metrics if each.step <= exported.step}
    evaluated = {e.step: e for e in record.events if isinstance(e, Evaluated)}
    evaluated = {step: e for step, e in sorted(evaluated.items()) if step <= exported.step}
    rows: list[tuple[str, ...]] = [("loss", "first", "at", "exported", "at")]
    if steps:
        rows.append(_row("training", {step: steps[step] for step in sorted(steps)}))
    if evaluated:
        rows.append(_row("evaluation", {step: e.loss for step, e in evaluated.items()}))
        for name in next(reversed(evaluated.values())).by_source:
            of_source = {step: e.by_source.get(name) for step, e in evaluated.items()}
            rows.append(_row(f"evaluation, {name}", of_source))
    return markdown_table(rows) if len(rows) > 1 else "None were recorded."


def _row(name: str, losses: Mapping[int, float | None]) -> tuple[str, ...]:
    first, last = next(iter(losses)), next(reversed(list(losses)))
    return (name, _loss(losses[first]), f"step {first}", _loss(losses[last]), f"step {last}")


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _files(exported: Exported) -> str:
    done = exported.converted
    dtype = f", floating values as {exported.dtype}" if exported.dtype else ""
    lines = [
        f"{format_bytes(done.num_bytes)} in {counted(done.tensors, 'tensor')}{dtype}.",
        f"SHA-256 of the tensors, read back: `{done.after}`.",
        *(f"{note[:1].upper()}{note[1:]}." for note in done.notes),
    ]
    return "\n".join(lines)
