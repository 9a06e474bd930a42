"""Secrets by the name that they are given, or by the command that takes them; no value is shown.

Names are read by their words, so `tokens_per_s`, `tokenizer` and `pad_token` are none. What refers
to a secret (`$HF_TOKEN`, `$(cat FILE)`, a path) or stands for one (`<token>`) is none either.
"""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SURE = re.compile(r"PASSWORD|(?<!NO)PASSWD|PASSPHRASE|APIKEY|SECRET$|^PWD$")
_TOKEN = re.compile("(ACCESS|API|AUTH|BEARER|BOT|DEPLOY|GITHUB|GIT|HF|REFRESH|SESSION|USER)?TOKEN")
"""In one word of a name: a secret wherever it stands."""

_ABOUT = {
    *("FILE", "PATH", "DIR", "NAME", "NAMES", "ARN", "STDIN", "LENGTH", "SIZE", "TYPE", "REF"),
    *("HASH", "DIGEST", "SHA", "SALT", "ID", "URL", "URI"),
}
"""Last words of what says where a secret is, or how it is made: `HF_TOKEN_PATH`."""

_ORDINARY_TOKENS = {
    *("PAD", "EOS", "BOS", "UNK", "MASK", "SEP", "CLS", "SPECIAL", "IMAGE", "AUDIO", "START"),
    *(
        "END",
        "STOP",
        "NEXT",
        "SAMPLE",
        "LAST",
        "FIRST",
        "PER",
        "MAX",
        "MIN",
        "NUM",
        "DECODER",
        "PREFIX",
    ),
}
"""Before `token`: one of a text."""

_SECRET_KEYS = {
    *("API", "ACCESS", "PRIVATE", "ENCRYPTION", "SIGNING", "AUTH", "ACCOUNT", "MASTER", "LICENSE"),
    *("STORAGE", "SHARED", "SERVICE", "SUBSCRIPTION", "DEPLOY"),
}
"""Before `key`, however it is written."""

_ORDINARY_KEYS = {
    "SORT",
    "PRIMARY",
    "PUBLIC",
    "PARTITION",
    "FOREIGN",
    "CACHE",
    "GROUP",
    "QUERY",
    "SITE",
}

_STANDS_FOR = re.compile(
    r"[$<{`%!].*|\.\.\.|x+|\*+|…|true|false|yes|no|none|null|auto|off|on|read|write|"
    r"env:[A-Za-z_]\w*|(os\.environ|getenv|getpass).*|[A-Za-z_][\w.]*\(.*|"
    r"(your|replace|change|fill|redacted|placeholder|example)([-_ ]?\w+)*",
    re.IGNORECASE,
)
_PATH = re.compile(r"(~|\.{0,2})/.*")
_AWS_SECRET = re.compile(r"[A-Za-z0-9/+]{40}")
_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+(=[A-Z0-9_]+)?")
"""`R2_ENDPOINT_URL`, `WANDB_API_KEY=TEAM_WANDB_API_KEY`: under which a secret is kept."""

_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]+)?")
_PUBLISHED = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The account key of Azurite, the emulator of Azure Storage, which everybody has: its documentation
at learn.microsoft.com/azure/storage/common/storage-use-azurite."""

_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s"';,&|)}\]]+)"""
_GIVEN = re.compile(
    r"""(?<!\$)(?<!\$\{)(?<![\w.-])(?P<name>[\w.-]+)["']?\]?(?:\s*:\s*|\s*=(?!=)\s*)(?="""
    + _VALUE
    + ")"
)
"""`NAME=value`, `name: value`, `"name": "value"`; the value may hold another one."""

_ENTRY_NAME = r"""(?<![\w.-])["']?name["']?\s*[:=]\s*["']?(?P<name>[\w.-]+)["']?"""
_ENTRY_VALUE = r"""(?<![\w.-])["']?value["']?[ \t]*[:=][ \t]*""" + _VALUE
_BETWEEN = r"(?:[\s,]|#.*\n)*"
_ENTRIES = tuple(
    re.compile(_BETWEEN.join(order), re.IGNORECASE)
    for order in ((_ENTRY_NAME, _ENTRY_VALUE), (_ENTRY_VALUE, _ENTRY_NAME))
)
"""`name: NAME` and `value: VALUE` of one entry, on one line or on two: Kubernetes' `env`, and
container definitions of other clouds."""

_DEFAULT = re.compile(r"\$\{(?P<name>\w+):?[-=](?P<value>[^}]+)\}")
_FLAG = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w-]*)\s+(?!-)(?=" + _VALUE + ")")
_FLAG_ALONE = re.compile(r"--?[A-Za-z][\w-]*")
_SET = re.compile(r"\bconfig(ure)?\s+set\s+(?P<name>[\w.-]+)\s+" + _VALUE)
"""`aws configure set NAME VALUE`, and others that do the same."""

_OPTIONS = r"(?:\s+--?[A-Za-z][\w-]*(?:=\S+)?)*"
_COMMANDS = (
    re.compile(
        r"\bwandb\s+login\b(?:\s+--(?:host|relogin|cloud)(?:[= ]https?://\S+)?)*"
        r"\s+(?!-)" + _VALUE
    ),
    re.compile(r"\bvault\s+login\b" + _OPTIONS + r"\s+(?!-)" + _VALUE),
    re.compile(r"\b(?:mysql|mariadb)\w*\b[^|;&]*?\s-p(?=\S)" + _VALUE),
    re.compile(r"\bsshpass\b[^|;&]*?\s-p\s*" + _VALUE),
    re.compile(
        r"\b(?:docker|podman|az|helm registry|skopeo|oras)\s+login\b[^|;&]*?\s-p\s*" + _VALUE
    ),
    re.compile(r"\bredis-cli\b[^|;&]*?\s-a\s*" + _VALUE),
    re.compile(r"\bcurl\b[^|;&]*?\s(?:-u\s*|--user[= ])[\"']?[^\s:\"'$]+:" + _VALUE),
    re.compile(r"\bAuthorization\s*:\s*(?:Bearer|Basic|token)\s+" + _VALUE, re.IGNORECASE),
    re.compile(r"\b(?:echo|printf)\s+(?:-n\s+)?" + _VALUE + r"\s*\|[^|]*(?:-stdin|--with-token)\b"),
)
"""What well known commands take for a secret; their own documentation."""

_LOGIN_CALL = re.compile(
    r"\b(?:wandb|huggingface_hub|hf_hub)\.login\(\s*(?:key\s*=\s*)?"
    r"""(?P<value>"[^"]{6,}"|'[^']{6,}')"""
)
"""Calls that take one without naming it: docs.wandb.ai, huggingface.co/docs/huggingface_hub."""

_AUTHORIZED = re.compile(
    r"""(?:^|["'])(?:Bearer|Basic|token)\s+(?P<value>[^"'\s{$]{6,})(?:["']|$)"""
)
"""The value of an `Authorization` header (RFC 6750, RFC 7617), quoted or alone."""


Form = Literal["text", "code", "json"]
"""Where a line stands: in code a word without quotes is a variable, in JSON a name has quotes."""


@dataclass(frozen=True, slots=True)
class Named:
    """A secret that its name makes one."""

    kind: str
    value: str

    @property
    def looks_made(self) -> bool:
        """Whether its letters and digits look drawn at random: long, of many different ones, often
        between capital letters, small ones and digits (`1x000000AA` is a key for trying out).

        Words (`token = "next"`), numbers, versions and names of several words
        (`x-aws-ec2-metadata-token`) are no secrets, whatever they are called, and passwords that
        people think of are mostly made up in others' examples; nor is a value that speaks of one:
        `team_1_API_KEY` names it where it is kept, `password1234` stands for one. Of base64 (a
        Kubernetes Secret's `data`) the text that it encodes counts.
        """
        plain = _encoded(self.value.strip("\"'"))
        letters = re.sub("[^A-Za-z0-9]", "", plain)
        return (
            not (re.search(r"\s", plain) or says_what_it_is(plain))
            and len(plain) >= _SHORTEST
            and len(set(letters)) >= _SHORTEST // 2
            and len(re.findall(r"\d+", letters)) > 1
            and 4 * len(_KINDS.findall(letters)) >= len(letters)
        )


_KINDS = re.compile("[a-z]+|[A-Z]+|[0-9]+")
"""Runs of one kind of character."""

_SHORTEST = 16
"""Characters, about 80 bits. A guess: keys that services hand out have more, and what people make
up for an example has less."""


def _encoded(value: str) -> str:
    """The text that a value encodes in base64, or the value itself.

    >>> _encoded("NTI0MTU5MDAwMDAwMDAwMA=="), _encoded("h7Gk29fjQ1ab")
    ('5241590000000000', 'h7Gk29fjQ1ab')
    """
    try:
        text = base64.b64decode(value, validate=True).decode("ascii")
    except ValueError:
        return value
    return text if text.isprintable() and len(text) >= _SHORTEST_PLAIN else value


_SHORTEST_PLAIN = 8
"""Characters of a password: NIST SP 800-63B, 5.1.1.2."""


def says_what_it_is(value: str) -> bool:
    """Whether a value speaks of a secret: it names one, or stands for one (`weak_password`)."""
    return _SAYS.search(value) is not None


_SAYS = re.compile(
    r"(?i)pass|secret|token|key|test|demo|dummy|fake|example|sample|placeholder|changeme|12345|"
    r"abcdef"
)


@lru_cache(maxsize=4096)  # files of one rendering, and those of one repository, share most lines
def find_in_text(text: str, form: Form = "text") -> Named | None:
    """The secret that a line of text holds, if any: `NAME=value`, a flag, a command.

    >>> find_in_text('"text": "my password: abc"', "json")
    """
    in_text = form == "text"
    for pattern in (_GIVEN, _DEFAULT, _FLAG, _SET) if in_text else (_GIVEN,):
        for match in pattern.finditer(text):
            if not in_text and not _QUOTED.fullmatch(match["value"]):
                continue
            if form == "json" and text[match.start() - 1 : match.start()] != '"':
                continue
            kind = find_under_name(match["name"], match["value"])
            if kind is not None:
                is_of_link = text[match.start() - 1 : match.start()] in {"?", "&"}
                return Named(kind, "" if is_of_link else match["value"])  # links are passed on
    for pattern in (_LOGIN_CALL, *_COMMANDS) if in_text else (_LOGIN_CALL,):
        for match in pattern.finditer(text):
            if not is_harmless(match["value"]):
                return Named("a secret that a command is given", match["value"])
    for match in _AUTHORIZED.finditer(text):
        named = Named("an authorization", match["value"])
        if named.looks_made:
            return named
    return next((named for _, named in find_entries(text, form)), None)


def find_entries(text: str, form: Form = "text") -> Iterator[tuple[int, Named]]:
    """Secrets in a list of names and values, each with the place of its value in the text.

    >>> [(place, named)] = find_entries("- name: DB_PASSWORD\\n  value: hunter2")
    >>> place, named.kind
    (29, 'the value of `DB_PASSWORD`, which is named like a secret')
    """
    for pattern in _ENTRIES:
        for match in pattern.finditer(text):
            if form != "text" and not _QUOTED.fullmatch(match["value"]):
                continue
            if form == "json" and match[0][0] != '"':
                continue
            kind = find_under_name(match["name"], match["value"])
            if kind is not None:
                yield match.start("value"), Named(kind, match["value"])


_IN_CODE = re.compile(r"[A-Za-z_][\w-]*")
_QUOTED = re.compile(r"""(?P<quote>["'])(?P<value>(?:(?!(?P=quote))[^\s\\]){6,})(?P=quote)""")
_LOGS_IN = {"LOGIN", "AUTH", "AUTHENTICATE", "AUTHORIZATION", "CREDENTIALS"}


def find_in_code(lines: str) -> str | None:
    """What kind of secret lines of a program may hold: a quoted word near a secret's name. It finds
    too many rather than too few: what is found is left out of a record, and nobody is told off.

    >>> find_in_code('os.environ["HF_TOKEN"] = "0123456789abcdef"')
    'a quoted value near `HF_TOKEN`'
    >>> find_in_code('token = os.environ["HF_TOKEN"]')
    """
    if _AUTHORIZED.search(lines):
        return "an authorization"
    names: list[str] = _IN_CODE.findall(lines)
    quoted = [match["value"] for match in _QUOTED.finditer(lines)]
    # "api_key" is a name of its own; "hunter2secret" is none.
    values = [each for each in quoted if re.search(r"\d", each) or _secret_word(each) is None]
    for name in names:
        word = _secret_word(name) or ("KEY" if _LOGS_IN & set(_words_of(name)) else None)
        if word is None:
            continue
        if any(not is_harmless(each, word) for each in values):
            return f"a quoted value near `{name[:60]}`"
    return None


def _words_of(name: str) -> list[str]:
    found: list[str] = _WORDS.findall(name)
    return [word.upper() for word in found]


def find_under_name(name: str, value: str) -> str | None:
    """What kind of secret a value is, if its name makes it one.

    >>> find_under_name("HF_TOKEN", "$HF_TOKEN")
    >>> find_under_name("tokens_per_s", "3000")
    >>> find_under_name("DB_PASSWORD", "hunter2")
    'the value of `DB_PASSWORD`, which is named like a secret'
    """
    word = _secret_word(name)
    if word is None or is_harmless(value, word):
        return None
    if _secret_word(value) and re.fullmatch("[A-Z_]+", value):  # `--secret HF_TOKEN`: another name
        return None
    return f"the value of `{name.lstrip('-')[:60]}`, which is named like a secret"


def flag_name(word: str) -> str | None:
    """The option that a word is, whose value is the next word."""
    return word if _FLAG_ALONE.fullmatch(word) else None


def _secret_word(name: str) -> str | None:
    """The word that makes it the name of a secret."""
    words = _words_of(name.rpartition("/")[2])
    while words and words[-1].isdecimal():
        words.pop()
    if not words or words[-1] in _ABOUT:
        return None
    if any(_SURE.search(word) for word in words):
        return "PASSWORD"
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if _TOKEN.fullmatch(last) and before not in _ORDINARY_TOKENS:
        return last
    loud = name == name.upper() and before not in _ORDINARY_KEYS
    return last if last == "KEY" and (loud or before in _SECRET_KEYS) else None


def is_harmless(value: str, word: str = "PASSWORD") -> bool:
    """Whether a value only refers to a secret, stands for one, or is none."""
    plain = value.strip().strip("\"'")
    if not plain or _STANDS_FOR.fullmatch(plain):
        return True
    if _PATH.fullmatch(plain) and not _AWS_SECRET.fullmatch(plain):
        return True
    if _NAME.fullmatch(plain) or plain == _PUBLISHED:
        return True
    return word != "PASSWORD" and _NUMBER.fullmatch(plain) is not None
