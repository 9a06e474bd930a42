"""Words that other software knows, from `software.toml`."""

from collections.abc import Mapping

from paceline.catalog.load import read_shipped


def words_of(software: str, key: str) -> frozenset[str]:
    """One list of words.

    >>> "NCCL_DEBUG" in words_of("environment", "nccl")
    True
    """
    return frozenset(read_shipped("software.toml")[software][key].split())


def words_by_section(software: str, key: str) -> Mapping[str, frozenset[str]]:
    """Section -> its words."""
    lists = read_shipped("software.toml")[software][key]
    return {section: frozenset(words.split()) for section, words in lists.items()}
