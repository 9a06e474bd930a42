"""What a text should not hold: keys, personal data, and signs that it was damaged.

Leaves out: names and addresses of people, and secrets without a documented form.
"""

import ipaddress
import re
from collections.abc import Iterator, Sequence

from paceline.job.secrets import find_issued

_EMAIL = re.compile(r"(?<=[\w+-])@((?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})(?!:)")
_NOT_PEOPLE = re.compile(r"(^|\.)(example\.(com|org|net)|invalid|test|localhost)$", re.IGNORECASE)
"""RFC 2606, sections 2 and 3."""

_DIGITS = re.compile(r"[0-9][0-9 ().-]{6,22}[0-9]")
"""Begins with a plain set of characters, which is found five times as fast."""

_PHONE = re.compile(r"\+[\d ().-]+|\(?\d{3}\)?[ .-]\d{3}[.-]\d{4}")
"""ITU-T E.164 with its plus sign, and the form of North America."""

_SSN = re.compile(r"(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}")
"""ssa.gov: numbers that are never assigned."""

_CARD = re.compile(r"4\d{15}|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|6(011|5\d\d)\d{12}")
"""ISO/IEC 7812 numbers of Visa, Mastercard, American Express and Discover."""

_IBAN = re.compile(r"[A-Z][A-Z][0-9]{2} ?(?:[A-Z0-9]{4} ?){2,7}[A-Z0-9]{1,4}")

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_MOJIBAKE = re.compile("\u00c3[\u0080-\u00bf]|\u00e2\u20ac|\u00c2[\u00a0-\u00bf]")
"""UTF-8 that was read as Windows-1252."""


def find_private(texts: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Number of a text, check and kind, for everything of this sort in some texts.

    >>> list(find_private(["write to ada@lovelace.org", "", "hf_" + "a1" * 17]))
    [(0, 'personal', 'an e-mail address'), (2, 'secrets', 'a Hugging Face token')]
    """
    has_secret = next(find_issued("\n".join(texts)), None) is not None  # much faster than each
    for number, text in enumerate(texts):
        for kind in find_issued(text) if has_secret else ():
            yield number, "secrets", kind
        for check, kind in _find_in(text):
            yield number, check, kind


def _find_in(text: str) -> Iterator[tuple[str, str]]:
    if "@" in text and any(not _NOT_PEOPLE.search(match[1]) for match in _EMAIL.finditer(text)):
        yield "personal", "an e-mail address"
    found = (_alone(text, match) for match in _DIGITS.finditer(text))
    for kind in sorted({_kind_of_digits(each) for each in found if each}):
        if kind:
            yield "personal", kind
    if any(_is_iban(_alone(text, match).replace(" ", "")) for match in _IBAN.finditer(text)):
        yield "personal", "a bank account (IBAN)"
    if "\ufffd" in text:
        yield "text-quality", "characters that could not be decoded (U+FFFD)"
    if _CONTROL.search(text):
        yield "text-quality", "control characters"
    if ("\u00c3" in text or "\u00c2" in text or "\u00e2" in text) and _MOJIBAKE.search(text):
        yield "text-quality", "UTF-8 that was decoded as Windows-1252"


def _alone(text: str, match: re.Match[str]) -> str:
    """What was matched, with a sign or bracket before it; nothing inside of a longer word."""
    start, end = match.span()
    if text[end : end + 1].isalnum():
        return ""
    before = text[start - 1 : start]
    if before in ("+", "("):
        start, before = start - 1, text[start - 2 : start - 1]
    return "" if before.isalnum() or before in ("_", ".") else text[start:end]


def _kind_of_digits(text: str) -> str:
    digits = re.sub(r"\D", "", text)
    if _CARD.fullmatch(digits) and _is_luhn(digits) and "." not in text:
        return "a card number"
    if _SSN.fullmatch(text):
        return "a US social security number"
    if text.count(".") == 3 and text.replace(".", "").isdecimal():
        try:
            return "an IP address" if ipaddress.IPv4Address(text).is_global else ""
        except ValueError:
            return ""
    return "a phone number" if _PHONE.fullmatch(text) and 8 <= len(digits) <= 15 else ""


def _is_luhn(digits: str) -> bool:
    """ISO/IEC 7812-1, annex B."""
    doubled = [int(digit) * 2 for digit in digits[-2::-2]]
    return (sum(map(int, digits[-1::-2])) + sum(d - 9 if d > 9 else d for d in doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """ISO 13616: the check digits."""
    moved = "".join(str(int(each, 36)) for each in text[4:] + text[:4])
    return 15 <= len(text) <= 34 and int(moved) % 97 == 1
