"""Accelerate's configuration file (`accelerate launch --config_file`)."""

from collections.abc import Iterator, Mapping

from paceline.catalog.load import read_shipped
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import INFO, WARNING, Fault
from paceline.check.lint.configs.schema import check_schema, load_schema
from paceline.check.lint.configs.variables import check_port
from paceline.check.lint.context import Context
from paceline.check.lint.words import words_of

SCHEMA = load_schema("accelerate")

_IN_THE_JSON = words_of("accelerate", "in_the_json")
_FSDP1: Mapping[str, str] = read_shipped("software.toml")["accelerate"]["fsdp1"]
_STRATEGIES: Mapping[str, str] = read_shipped("software.toml")["accelerate"]["strategies"]
_BY_NUMBER = dict(zip("12345", _STRATEGIES, strict=True))


def is_accelerate(document: Marked) -> bool:
    """Whether a YAML mapping is Accelerate's: these words are nobody else's."""
    words = {"compute_environment", "main_training_function", "num_machines"}
    return document.at("distributed_type") is not None and bool(
        words & set(dict(document.entries()))
        or document.at("num_processes")
        or document.at("fsdp_config")
        or document.at("deepspeed_config")
    )


def check_accelerate(config: Marked, context: Context) -> Iterator[Fault]:
    """Everything the file shows, alone and on the machines of the context."""
    yield from check_schema(SCHEMA, config, context)
    port, number = config.at("main_process_port"), config.number("main_process_port")
    if port is not None and number is not None:
        yield from check_port(port, "main_process_port", number)
    kind = (config.text("distributed_type") or "").upper()
    if kind == "FSDP":
        yield from _check_fsdp(config)
    named = config.at("deepspeed_config", "deepspeed_config_file")
    if kind == "DEEPSPEED" and named is not None:
        for name in sorted(_IN_THE_JSON):
            if (clash := config.at("deepspeed_config", name)) is not None:
                file = named.text()
                what = (
                    f"{name} is given beside deepspeed_config_file: {file}, which has to set it: "
                    "Accelerate ends with a ValueError"
                )
                fix = f"take it out here, and set it in {file}"
                seen = (("", named.line, f"deepspeed_config_file: {file}"),)
                yield Fault("ds-config-silent-keys", clash, what, fix, seen=seen)


def _check_fsdp(config: Marked) -> Iterator[Fault]:
    entries = config.entries("fsdp_config")
    keys = {name.removeprefix("fsdp_"): value for name, value in entries}
    offload, wrap = keys.get("offload_params"), keys.get("auto_wrap_policy")
    if offload is not None and offload.true() and (wrap is None or wrap.text() == "NO_WRAP"):
        what = (
            "without a wrap policy the model is one unit: all its offloaded weights come to the "
            "GPU together"
        )
        fix = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        yield Fault("fsdp-cpu-offload-oom", wrap or offload, what, fix)
    version, strategy = keys.get("version"), keys.get("sharding_strategy")
    if version is None or version.number() != 2:
        return
    stray = "is a key of FSDP1, and fsdp_version is 2: it"
    if strategy is not None:
        what = f"fsdp_sharding_strategy {stray} is not read"
        asked = (strategy.text() or "").lower()
        instead = _STRATEGIES.get(_BY_NUMBER.get(asked, asked), "fsdp_reshard_after_forward")
        fix = "take it out" if "reshard_after_forward" in keys else f"instead {instead}"
        yield Fault("config-unknown-key", strategy, what, fix, WARNING)
    for name in keys.keys() & _FSDP1:
        what = f"fsdp_{name} {stray} {_FSDP1[name]}"
        yield Fault("config-unknown-key", keys[name], what, "take it out", INFO)
