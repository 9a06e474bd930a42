"""Whether a program's models are sharded by what starts it: Accelerate's YAML and its options."""

from collections.abc import Sequence

from paceline.check.lint.configs import Config
from paceline.check.lint.configs.launch_line import Launch, file_name


def is_sharded(launches: Sequence[Launch], configs: Sequence[Config]) -> bool:
    """Whether Accelerate gives each rank a part of the weights: FSDP, or ZeRO's third stage.

    Args:
        launches: The launch lines that name the program. Where they differ, it is not.
        configs: Every configuration of the folder: the only one of Accelerate is taken where no
            launch line says which.
    """
    ours = [one for one in configs if one.kind == "accelerate"]
    started = [one for one in launches if one.program == "accelerate"]
    if started:
        return all(_says_launch(one, ours, configs) for one in started)
    return len(ours) == 1 and not launches and _says_config(ours[0], configs)


def _says_launch(launch: Launch, ours: Sequence[Config], configs: Sequence[Config]) -> bool:
    if "use_fsdp" in launch.options:
        return True
    if "use_deepspeed" in launch.options:
        stage = launch.option("zero_stage")
        return stage is not None and stage.text == "3"
    named = launch.option("config_file")
    if named is None:
        return len(ours) == 1 and _says_config(ours[0], configs)
    return any(
        _says_config(one, configs) for one in ours if file_name(one.path) == file_name(named.text)
    )


def _says_config(config: Config, configs: Sequence[Config]) -> bool:
    kind = (config.document.text("distributed_type") or "").upper()
    if kind == "FSDP":
        return True
    if kind != "DEEPSPEED":
        return False
    if config.document.number("deepspeed_config", "zero_stage") == 3:
        return True
    named = config.document.text("deepspeed_config", "deepspeed_config_file")
    return any(
        one.kind == "deepspeed" and one.document.number("zero_optimization", "stage") == 3
        for one in configs
        if named is not None and file_name(one.path) == file_name(named)
    )
