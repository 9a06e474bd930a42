"""What is known beforehand: accelerators, links, prices and published models, with sources."""

from paceline.catalog.accelerator import PRECISIONS, Accelerator, Backend
from paceline.catalog.find import catalog_name, find_accelerator, find_link
from paceline.catalog.link import Link
from paceline.catalog.load import (
    accelerator_named,
    accelerator_spellings,
    load_accelerators,
    load_links,
)
from paceline.catalog.price import (
    Price,
    cheapest_prices,
    find_prices,
    load_prices,
    offers_of_nodes,
)
from paceline.catalog.provider import Provider, load_providers
from paceline.catalog.user import (
    CATALOG_FILE,
    Catalog,
    built_in_catalog,
    find_catalog_file,
    load_catalog,
)

__all__ = [
    "CATALOG_FILE",
    "PRECISIONS",
    "Accelerator",
    "Backend",
    "Catalog",
    "Link",
    "Price",
    "Provider",
    "accelerator_named",
    "accelerator_spellings",
    "built_in_catalog",
    "catalog_name",
    "cheapest_prices",
    "find_accelerator",
    "find_catalog_file",
    "find_link",
    "find_prices",
    "load_accelerators",
    "load_catalog",
    "load_links",
    "load_prices",
    "load_providers",
    "offers_of_nodes",
]
