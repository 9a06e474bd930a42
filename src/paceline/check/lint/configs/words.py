"""Lists of known words, written as text."""


def words(text: str) -> frozenset[str]:
    """The words of a text.

    >>> sorted(words("one two"))
    ['one', 'two']
    """
    return frozenset(text.split())
