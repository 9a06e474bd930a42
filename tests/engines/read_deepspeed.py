"""Reads `ds_config.json` in this folder with DeepSpeed's own class, for a number of ranks.

That class takes keys at the top which it does not know without a word: they are held against the
names in DeepSpeed's constants.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

from deepspeed.runtime import config as runtime
from deepspeed.runtime import constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

GIVEN = {ACT_CHKPT, ZERO_OPTIMIZATION, "pipeline"}


def main() -> None:
    """Ends with a message and 1 where DeepSpeed would misread the file."""
    values = json.loads(Path("ds_config.json").read_text())
    texts = (getattr(constants, name) for name in dir(constants) if name.isupper())
    known = GIVEN | {text for text in texts if isinstance(text, str)}
    if unknown := sorted(set(values) - known):
        sys.exit(f"DeepSpeed knows no {', '.join(unknown)}")
    world = int(sys.argv[1])
    where = "deepspeed.runtime.config.dist"
    with (
        patch(f"{where}.get_rank", return_value=0),
        patch(f"{where}.get_world_size", return_value=world),
    ):
        found = runtime.DeepSpeedConfig(values)
    sections = runtime.get_pipeline_config({})
    if unknown := sorted(set(found.pipeline) - set(sections)):
        sys.exit(f"DeepSpeed's pipeline knows no {', '.join(unknown)}")
    offload = found.zero_config.offload_optimizer
    if offload is not None and offload.device == "nvme" and offload.nvme_path is None:
        sys.exit("nvme without nvme_path")
    said = {
        "world": found.world_size,
        "train_batch_size": found.train_batch_size,
        "micro": found.train_micro_batch_size_per_gpu,
        "accumulation": found.gradient_accumulation_steps,
        "stage": int(found.zero_config.stage),
        "clipping": found.gradient_clipping,
        "bf16": bool(found.bfloat16_config.enabled),
        "optimizer": found.optimizer_name,
        "pipeline": found.pipeline,
        "offload": None if offload is None else offload.device,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
