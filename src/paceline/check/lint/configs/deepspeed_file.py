"""Accelerate's `mixed_precision` beside the DeepSpeed file that it names."""

from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs import Config
from paceline.check.lint.configs.launch_line import Launch, file_name
from paceline.check.lint.configs.say import ERROR, found


def check_deepspeed_file(
    config: Config, launches: Sequence[Launch], configs: Sequence[Config]
) -> Iterator[Finding]:
    """A precision in Accelerate's YAML that its DeepSpeed file has to say: the start raises.

    Leaves out: files whose launch lines all say `--mixed_precision`, which replaces the field and
    is not looked at by that check.

    Source: `launch_command` and `DeepSpeedPlugin._deepspeed_config_checks` of accelerate 1.15.
    """
    document = config.document
    precision = document.at("mixed_precision")
    named = document.at("deepspeed_config", "deepspeed_config_file")
    if precision is None or precision.value is None or named is None:
        return
    if (document.text("distributed_type") or "").upper() != "DEEPSPEED":
        return
    mine = [one for one in launches if _names(one, config)]
    if mine and all(one.option("mixed_precision") is not None for one in mine):
        return
    said, file = precision.text(), named.text() or ""
    evidence = [(config.path, named.line, f"deepspeed_config_file: {file}")]
    against = ""
    inner = next(
        (
            one
            for one in configs
            if one.kind == "deepspeed" and file_name(one.path) == file_name(file)
        ),
        None,
    )
    other = {"fp16": "bf16", "bf16": "fp16"}.get(said or "", "")
    enabled = inner.document.at(other) if inner is not None and other else None
    if inner is not None and enabled is not None and enabled.true("enabled"):
        against = f" and enables {other}"
        evidence.append((inner.path, enabled.line, f"{other} is enabled"))
    yield found(
        "ds-config-silent-keys",
        ERROR,
        config.path,
        precision.line,
        f"mixed_precision: {said} is given beside deepspeed_config_file: {file}, which has to "
        f"say it{against}: Accelerate ends with a ValueError",
        fix=f"take it out here, and set it in {file}",
        evidence=evidence,
    )


def _names(launch: Launch, config: Config) -> bool:
    named = launch.option("config_file")
    return named is not None and file_name(named.text) == file_name(config.path)
