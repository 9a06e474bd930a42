"""What a name means in a catalog: an accelerator or a link in any spelling, or an error with the
nearest one.
"""

from dataclasses import replace

from paceline.catalog._rows import no_such
from paceline.catalog.accelerator import Accelerator
from paceline.catalog.link import Link
from paceline.catalog.load import (
    accelerator_named,
    accelerator_spellings,
    by_smi_name,
    load_accelerators,
    load_links,
)
from paceline.catalog.mig import num_slices, slice_of, split_slice
from paceline.catalog.user import Catalog
from paceline.errors import JobError, Problem


def find_accelerator(name: str, *, where: str, catalog: Catalog | None = None) -> Accelerator:
    """The accelerator of that name or alias, in any case, or as its own tool reports it.

    Args:
        name: As a person, a data sheet or `nvidia-smi` writes it: `h100`, `A100-SXM4-80GB`,
            `NVIDIA H100 80GB HBM3`.
        where: Its place in the job, for the message.
        catalog: Where to look; the built-in one when left out.

    Raises:
        JobError: `T001`, naming the nearest one.
    """
    accelerators = load_accelerators() if catalog is None else catalog.accelerators
    if (found := accelerator_named(name, accelerators)) is not None:
        return found
    card, profile = split_slice(name)
    whole = accelerator_named(card, accelerators) if profile is not None else None
    if whole is not None:
        raise JobError(_no_such_slice(whole, profile, where))
    spellings = accelerator_spellings(accelerators)
    raise JobError(_or_own(no_such("T001", "accelerator", name, spellings, where)))


def find_link(name: str, *, where: str, catalog: Catalog | None = None) -> Link:
    """The link of that name, in any case.

    Raises:
        JobError: `T004`, naming the nearest one.
    """
    links = load_links() if catalog is None else catalog.links
    found = {known.lower(): link for known, link in links.items()}.get(name.strip().lower())
    if found is None:
        unknown = no_such("T004", "link", name, {each: each for each in links}, where)
        raise JobError(_or_own(unknown))
    return found


def catalog_name(smi_name: str, catalog: Catalog | None = None) -> str | None:
    """The catalog's name of a GPU as its own tool reports it, or None when it is not in there.

    >>> catalog_name("NVIDIA H100 80GB HBM3"), catalog_name("Aqua Vanjaram [Instinct MI300X]")
    ('H100-SXM', 'MI300X')
    """
    accelerators = load_accelerators() if catalog is None else catalog.accelerators
    card, profile = split_slice(smi_name)
    found = by_smi_name(card, accelerators)
    if found is None or profile is None:
        return found
    part = slice_of(accelerators[found], profile)
    return None if part is None else part.name


def _or_own(unknown: Problem) -> Problem:
    own = "describe it in your own catalog file: `paceline catalog --write paceline-catalog.toml`"
    return replace(unknown, fix=f"{unknown.fix}; or {own}")


def _no_such_slice(card: Accelerator, profile: str | None, where: str) -> Problem:
    has = ", ".join(f"{each} ({num_slices(card, each)} of it)" for each in card.mig_profiles)
    return Problem(
        code="T001",
        what=f"{card.name} has no slice (MIG) `{profile}`",
        where=where,
        fix=f"choose one of its own: {has}; `nvidia-smi -L` lists those of a machine"
        if has
        else f"name the whole card, {card.name}: the catalog knows no slices of it",
    )
