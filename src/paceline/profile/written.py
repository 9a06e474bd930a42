"""What a family's class in transformers writes out, from its row of families.toml and the file.

Source: modeling code of transformers 5.23; the bytes are those that `paceline prove` counts.
"""

from collections.abc import Mapping
from typing import Any

from paceline.profile.block import Written
from paceline.profile.fields import Fields

_ACTIVATIONS = {"gelu_new": 3, "quick_gelu": 1}
"""Activation functions of several kernels -> tensors that they keep besides input and output.
activations.py: NewGELUActivation keeps half of its input, the tangent and one more than it;
QuickGELUActivation the sigmoid."""


def written_of(
    fields: Fields, row: Mapping[str, Any], *, norm: int = 0, rotated: float = 0
) -> Written:
    """Facts of a block.

    Args:
        fields: Of the config.json.
        row: `written` of its family.
        norm: Where the row does not say, and so `rotated`.
    """
    name, default = row.get("activation", (None, ""))
    activation = fields.text(name, default=default) if name else default
    dropout, capped = row.get("dropout"), row.get("capped")
    return Written(
        norm=row.get("norm", norm),
        rotated=row.get("rotated", rotated),
        activation=_ACTIVATIONS.get(activation, 0),
        drops=int(dropout is not None and fields.number(*dropout) > 0),
        ops=row.get("ops", Written().ops),
        joined=int(row.get("joined", False)),
        capped=int(capped is not None and fields.number(*capped) > 0),
    )
