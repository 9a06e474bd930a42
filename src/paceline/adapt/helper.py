"""One name that an adapted script gets, and those that every form has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """One name that the script gets."""

    text: str
    imports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


NULLCONTEXT = Helper(text="", imports=("from contextlib import nullcontext",))

SILENT = Helper(
    text='''\
class Silent:
    """Takes every call and does nothing: a writer on the ranks that write nothing."""

    def __getattr__(self, name):
        return lambda *values, **options: None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None
''',
)
