"""What only a cloud needs to know: when to stop, what to spend, which secrets by name."""

from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.job.places import Line
from paceline.job.section import Auto, Wait, section

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_REGION = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
_IMAGE = r"^[a-z0-9][a-z0-9._:/@-]*(:[A-Za-z0-9_][\w.-]*)?$"


def _check_bucket(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    name = rest.strip("/")
    plain = all(letter.isalnum() or letter in "._-/" for letter in name)
    if not separator or scheme not in ("s3", "gs", "r2", "cos") or not name or not plain:
        raise ValueError("write it like s3://bucket/prefix or gs://bucket/prefix")
    return value.rstrip("/")


@section
class CloudSpec:
    """Read by the engines `sky`, `modal`, `runpod`, `lambda` and `vertex`, and by
    `run --on sky`."""

    region: Annotated[str, Field(pattern=_REGION)] | None = None
    """Where to rent: `us-east-1`. Left out, the provider or SkyPilot chooses."""

    image: Annotated[str, Field(pattern=_IMAGE)] | None = None
    """Container image. Left out, the provider's own with PyTorch, where it has one."""

    idle_stop: Wait = 600.0
    """Machines are given back when their accelerators have done nothing for so long: `10m`."""

    max_run: Wait | Auto = "auto"
    """The run is ended after so long. `auto` is one and a half times what the plan expects and half
    an hour, or what `plan.budget` pays for if that is less."""

    storage: Annotated[str, AfterValidator(_check_bucket)] | None = None
    """Bucket for checkpoints: `s3://bucket/prefix`, `gs://bucket/prefix`. Left out, they are on the
    machine, and lost with it."""

    secrets: list[Annotated[str, Field(pattern=_VARIABLE)]] = Field(default_factory=list)
    """Names of environment variables that the program needs and that nobody may read, such as
    `HF_TOKEN`. Their values come from the environment of whoever submits, never from a file."""

    setup: list[Line] = Field(default_factory=list)
    """Shell commands on every machine before anything is started; they are run as they are
    written."""
