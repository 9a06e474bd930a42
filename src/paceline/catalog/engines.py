"""Software that runs a training step: what it keeps and what it hides, from `engines.toml`."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from paceline.catalog._rows import make_row
from paceline.catalog.load import read_shipped
from paceline.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One software stack. Fields are explained at the top of `engines.toml`."""

    name: str
    aliases: tuple[str, ...]
    weight_bytes: float
    sharded_bytes: float
    gradient_bytes: float
    passing_bytes: float
    master_bytes: float
    reduce_bytes: float
    step_bytes: float
    buffer_bytes: float
    cast_bytes: float
    attention: Literal["flash1", "flash2", "flash3", "unfused"]
    host: Literal["eager", "fused", "compiled"]
    graphs_on: tuple[str, ...]
    overlaps_gradients: bool
    overlaps_gathers: bool
    overlaps_tensor: bool
    overlaps_pipeline: bool
    reduces_each: bool
    norm_bytes: float
    attention_casts: int
    ffn_casts: int
    gated_copies: float
    plain_copies: float
    score_bytes: float
    dropout_bytes: float
    logit_bytes: float
    loss_peak_bytes: float
    gathered_inputs: bool
    selective_cheap: bool
    selective_products: float
    balances_stages: bool
    dummy_gradients: bool
    narrow_routed_moments: bool
    reserved_share: float
    source: str


@cache
def load_engines() -> Mapping[str, Engine]:
    """Every engine of the catalog by its name."""
    rows = read_shipped("engines.toml")
    return {name: make_row(Engine, {**row, "name": name}) for name, row in rows.items()}


def find_engine(name: str, *, where: str) -> Engine:
    """The engine of that name, or the one whose alias the name begins with.

    Raises:
        JobError: `E001`, naming the nearest ones; `where` is its place in the job.

    >>> find_engine("Composer FSDP (llm-foundry)", where="").name
    'fsdp1'
    """
    engines = load_engines()
    wanted = name.strip().lower()
    if wanted in engines:
        return engines[wanted]
    matches = [
        (len(alias), engine)
        for engine in engines.values()
        for alias in engine.aliases
        if wanted.startswith(alias)
    ]
    if matches:
        return max(matches, key=lambda match: match[0])[1]
    near = difflib.get_close_matches(wanted, engines, n=2, cutoff=0.4)
    raise JobError.of(
        code="E001",
        what=f"the catalog has no engine `{name}`",
        where=where,
        fix=(f"did you mean {' or '.join(near)}? " if near else "")
        + f"Known are {', '.join(engines)}",
    )
