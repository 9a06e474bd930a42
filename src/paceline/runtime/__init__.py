"""Do it: what runs inside every worker. Import `Session` from here for code of your own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.runtime.session import Session
    from paceline.runtime.step import Step

__all__ = ["Session", "Step"]


def __getattr__(name: str) -> Any:
    """`Session` and `Step` bring torch with them, so they are imported when first asked for."""
    if name in __all__:
        from paceline.runtime import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
