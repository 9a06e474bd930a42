"""Reads `accelerate.yaml` in this folder as `accelerate launch` does, and says what it understood.

Its loader knows the keys at the top only: those below are held against the launcher's own options.
Prints the environment that its ranks would get, as JSON.
"""

import json
import os
import sys
from pathlib import Path

import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import launch as launchers

CONFIG = "accelerate.yaml"


def check_nested(values: dict, options: dict) -> None:
    """Every key below the top is an option of the launcher, with a value that it takes."""
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        for key, value in values.get(section, {}).items():
            if key not in options:
                sys.exit(f"{section}: the launcher has no {key}")
            choices = options[key].choices
            if choices and str(value) not in {str(choice) for choice in choices}:
                sys.exit(f"{section}.{key}: {value} is none of {choices}")


def main() -> None:
    """Ends with a message and 1 where Accelerate would misread the file."""
    values = yaml.safe_load(Path(CONFIG).read_text())
    load_config_from_file(CONFIG)
    parser = launch.launch_command_parser()
    check_nested(values, {action.dest: action for action in parser._actions})
    if values.get("mixed_precision", "no") not in ("no", "bf16", "fp16", "fp8"):
        sys.exit(f"mixed_precision: {values['mixed_precision']}")
    more = ["--machine_rank", "0", "--main_process_ip", "192.0.2.1", "--main_process_port", "29500"]
    args = parser.parse_args(["--config_file", CONFIG, *more, "train.py"])
    args, defaults, _ = launch._validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environment = launchers.prepare_deepspeed_cmd_env(args)[1]
    else:
        environment = launchers.prepare_multi_gpu_env(args)
    os.environ.update(environment)
    if args.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
    said = {}
    if args.use_deepspeed:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
        said["deepspeed"] = plugin.deepspeed_config
    words = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DEEPSPEED_")
    said |= {name: value for name, value in environment.items() if name.startswith(words)}
    said |= {"num_processes": args.num_processes, "num_machines": args.num_machines}
    said |= {"use_fsdp": args.use_fsdp, "use_deepspeed": args.use_deepspeed}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
