"""What machines and software reach of their peaks in training, from `efficiencies.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from paceline.catalog._rows import amount, make_row, number
from paceline.catalog.mig import split_slice

Rate = Annotated[float, number]
Amount = Annotated[float, amount]
AS_OTHER = {"fp16": "bf16", "tf32": "fp32", "fp4": "nvfp4", "mxfp8": "fp8"}
"""Precisions that are as fast, in share of their own peak, as another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulEfficiency:
    """Constants of one product's time; the formula is at the top of `efficiencies.toml`."""

    share: Rate
    """Share of the peak, for endless matrices."""

    short_k: Amount
    """K at which a product takes twice as long for each multiplication."""

    wave: Amount
    """How much of a half-empty last wave of tiles is lost."""

    launch_s: Amount
    memory_share: Rate
    """Share of the memory's peak bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """All constants of the time model. Fields are explained in `efficiencies.toml`."""

    matmul: Mapping[str, Mapping[str, MatmulEfficiency]]
    """Family -> precision -> constants."""

    family: Mapping[str, str]
    """Accelerator -> family."""

    trained: Mapping[str, tuple[str, ...]]
    """`on`: accelerators with training runs among those that the constants are fitted to."""

    nearest: Mapping[str, str]
    """Family -> the one whose products are taken where its own were not measured in a precision."""

    hopper_kernels: Mapping[str, tuple[str, ...]]
    """`families`: those that run FlashAttention 3 and cuDNN's kernels."""

    sustained: Mapping[str, float]
    sustained_by_precision: Mapping[str, float]
    attention: Mapping[str, float]
    attention_half_len: Mapping[str, float]
    hidden_passes: Mapping[str, float]
    ffn_passes: Mapping[str, float]
    host_s: Mapping[str, float]
    step: Mapping[str, float]

    def family_of(self, accelerator: str) -> str:
        """The family whose constants an accelerator has; `other` when none was measured."""
        whole, _ = split_slice(accelerator)
        return self.family.get(accelerator) or self.family.get(whole, "other")

    def of_accelerator(self, values: Mapping[str, float], accelerator: str) -> float:
        """An entry of `sustained` or `attention_half_len`: the accelerator's own where it was
        measured, else its family's, else the usual one."""
        names = (accelerator, split_slice(accelerator)[0], self.family_of(accelerator))
        return next((values[name] for name in names if name in values), values["other"])

    def has_hopper_kernels(self, accelerator: str) -> bool:
        """Whether it runs FlashAttention 3 and cuDNN's kernels."""
        return self.family_of(accelerator) in self.hopper_kernels["families"]

    def matmul_of(self, accelerator: str, precision: str) -> MatmulEfficiency:
        """Constants of products on an accelerator; of its family's, else of the usual ones."""
        kind = AS_OTHER.get(precision, precision)
        rows = self.matmul[self.source_of(accelerator, precision)]
        return rows.get(kind) or rows["fp8"]

    def source_of(self, accelerator: str, precision: str) -> str:
        """Whose products `matmul_of` takes: its own, its family's, the nearest's, or `other`."""
        kind = AS_OTHER.get(precision, precision)
        family = self.family_of(accelerator)
        for name in (accelerator, family, self.nearest.get(family, "")):
            if kind in self.matmul.get(name, {}):
                return name
        return "other"


MEASURED_LINKS = ("link_share", "link_latency_s", "network_share", "network_latency_s")
"""Keys of `[step]` that a calibrated machine has, instead of its links' rows in the catalog."""


@cache
def load_efficiencies() -> Efficiencies:
    """The constants Paceline ships."""
    text = (files("paceline.catalog") / "efficiencies.toml").read_text(encoding="utf-8")
    return make_efficiencies(tomllib.loads(text))


def make_efficiencies(tables: Mapping[str, Any]) -> Efficiencies:
    """The constants of a parsed file."""
    matmul = {
        family: {
            kind: make_row(
                MatmulEfficiency, row, where=f"matmul.{family}.{kind}", file="efficiencies.toml"
            )
            for kind, row in rows.items()
        }
        for family, rows in tables["matmul"].items()
    }
    return Efficiencies(**(dict(tables) | {"matmul": matmul}))


def with_measured(
    base: Efficiencies, rows: Mapping[str, Mapping[str, Any]], *, accelerator: str
) -> Efficiencies:
    """The constants with those of a user's file instead: its tables `[efficiencies.ACCELERATOR]`.

    A table may have `matmul.PRECISION` (any of share, short_k, wave, launch_s, memory_share),
    `sustained`, `attention_half_len`, and any key of `[attention]` and `[step]`; `family` is there
    for an accelerator that is `like` another.

    Args:
        rows: Tables by accelerator.
        accelerator: Whose table is taken. Those of others would change `[attention]` and `[step]`
            for it too.
    """
    row = rows.get(accelerator, {})
    names = ("matmul", "family", "sustained", "attention_half_len", "attention", "step")
    tables: dict[str, dict[str, Any]] = {name: dict(getattr(base, name)) for name in names}
    tables["family"] |= {accelerator: row["family"]} if "family" in row else {}
    base = replace(base, family=tables["family"])
    own = dict(base.matmul.get(accelerator, {}))
    for kind, values in row.get("matmul", {}).items():
        usual = base.matmul_of(accelerator, kind)
        fields = {name: getattr(usual, name) for name in MatmulEfficiency.__slots__}
        own[kind] = MatmulEfficiency(**(fields | dict(values)))
    tables["matmul"][accelerator] = own
    for name in ("sustained", "attention_half_len"):
        if name in row:
            tables[name][accelerator] = row[name]
    for name in ("attention", "step"):
        known = (*tables[name], *(MEASURED_LINKS if name == "step" else ()))
        tables[name] |= {key: row[key] for key in row if key in known}
    return replace(base, **tables)
