"""Values as text and back: sizes, durations, TOML, dotted keys, and what an error shows of one or masks."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias
from urllib.parse import unquote_plus

from protocols.floods import TOML_PARTS, TOML_WORD

Key: TypeAlias = tuple[str, ...]

_SHOWN = 100
_SCALES = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATIONS = {"": Fraction(1), "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600)}
SIZE_UNITS, DURATION_UNITS = tuple(_SCALES), tuple(_DURATIONS)
"""In lower case, though the case of their letters says nothing; the empty one is meant without."""
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes from "65536", "64 KiB" (1024) or "64 kB" (1000); ValueError for anything else, and for part of a byte."""
    scaled = _scaled(text, {unit: Fraction(scale) for unit, scale in _SCALES.items()})
    if scaled.denominator != 1:
        raise ValueError("not a whole number of bytes")
    return int(scaled)


def parse_duration(text: str) -> float:
    """Seconds from "30", "30s", "500ms", "5min" or "1h"; ValueError for anything else."""
    return float(_scaled(text, _DURATIONS))


def _scaled(text: str, scales: Mapping[str, Fraction]) -> Fraction:
    match = _QUANTITY.fullmatch(text.strip())
    scale = scales.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError("not a number with a unit")
    return Fraction(match[1]) * scale  # a Decimal would leave its context in that of every task


def written_size(size: int) -> str:
    """A size as TOML, with the largest binary unit that divides it, or without a unit if it has more digits than
    `parse_size` reads."""
    for name in ("GiB", "MiB", "KiB"):
        if 0 < size < 10**15 and size % _SCALES[name.lower()] == 0:
            return f'"{size // _SCALES[name.lower()]} {name}"'
    return toml(size)


# Strings of several lines, strings and comments, each passed over whole; what counts in a text; a word that is too long.
_TOML = re.compile(
    r""""{3}(?:[^"\\]|\\[\s\S]|""?(?!"))*+(?:"{3,5})?|'{3}(?:[^']|''?(?!'))*+(?:'{3,5})?"""
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|\#[^\n]*+|[\[\]{}.=,\n]"""
    rf"""|[^\s"'\#\[\]{{}}.=,]{{{TOML_WORD + 1}}}"""
)


def read_toml(text: str) -> dict[str, Any]:
    """The content of a TOML document; ValueError for any other text, and for one that is deeper or has longer words than a
    person writes. The time of the stdlib's reader grows with the square of a key's parts, and it recurses for each array."""
    _check_toml(text)
    try:
        return tomllib.loads(text)
    except RecursionError as e:
        raise ValueError(str(e)) from None


def _check_toml(text: str) -> None:
    """Raises ValueError for keys and values inside each other of more than TOML_PARTS parts, and for a longer bare word than
    TOML_WORD. It looks at each character once, and finds no other mistake."""
    inside: list[int] = []  # the parts that each open bracket adds to `around`
    around = dots = 0
    in_value = False
    for token in _TOML.finditer(text):
        match token[0]:
            case ".":
                dots += not in_value
                if around + dots >= TOML_PARTS:
                    raise ValueError(f"line {_line(text, token)} has a key of more than {TOML_PARTS} parts")
            case "\n" | ",":
                dots, in_value = 0, False
            case "=":
                in_value = True
            case "[" | "{":
                head = not around and not in_value  # begins a table: its brackets hold a key
                inside.append(0 if head else dots + 1)
                around += inside[-1]
                if around > TOML_PARTS:
                    raise ValueError(f"line {_line(text, token)} has values more than {TOML_PARTS} deep")
                dots, in_value = 0, False
            case "]" | "}" if inside:
                around -= inside.pop()
                dots, in_value = 0, True
            case word if len(word) > TOML_WORD and word[0] not in "\"'#":
                said = f"{word[:20]}..."
                raise ValueError(f"line {_line(text, token)} has a word of more than {TOML_WORD} characters: {said}")


def _line(text: str, token: re.Match[str]) -> int:
    return text.count("\n", 0, token.start()) + 1


def toml_value(text: str) -> Any:
    """The value that TOML reads, or the text itself if it is not TOML, so that a word needs no quotes."""
    try:
        document = read_toml(f"value = {text}")
    except ValueError:
        return text
    return document["value"] if len(document) == 1 else text


def toml(value: Any) -> str:
    """A value as TOML, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{dotted((name,))} = {toml(item)}" for name, item in value.items()) + "}"
        case int() | float():
            return repr(value)
        case _:
            return str(value.isoformat())


def dotted(path: Key) -> str:
    """The key of a setting as a file or `--set` would write it: a name with other characters is quoted."""
    return ".".join(name if name == "*" or re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name) for name in path)


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, but for U+007F, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def plain(source: str) -> str:
    """The name of a source in an error: as it is where it can be printed."""
    return show(source, quoted=False)


def show(value: Any, *, quoted: bool = True) -> str:
    """A value in an error: on one line, and of bounded length."""
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = ascii(value) if quoted or not str(value).isprintable() else str(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


MASK = "********"

# -- by name -----------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\dA-Za-z_]+")
# Also run together with what is before it, as in `secretkey`: what is masked too much harms nobody.
_SAYS_SECRET = re.compile(
    "(?P<token>token)s?$|(?:pass|passwd|password|passphrase|pwd|pat|secret|key|credential|dsn|cookie|auth|authorization"
    "|signature|sig|connectionstring)s?$"
)
_NOT_THOSE = frozenset(("compat",))  # LMI's tgi_compat is no personal access token
# Tokens of text: those that have a meaning of their own, right behind the word, and numbers of them: max_new_tokens.
_MARKS = frozenset(("eos", "bos", "pad", "unk", "stop", "special"))
_COUNTS = frozenset(("max", "min", "num"))
_RUN_TOGETHER = re.compile(f"(?:{'|'.join((*_MARKS, *_COUNTS))})(?:new)?")
# Settings of ours that say where a secret is, and not what it is.
_FILES = frozenset(
    (
        ("tls", "key"),
        ("operator", "token_file"),
        ("metrics", "token_file"),
        ("sagemaker", "sigv4", "credentials"),
        ("access", "keys_file"),
    )
)

# -- by form -----------------------------------------------------------------------------------------------------------
# Each pattern looks at a character a bounded number of times, whatever a text holds.

_PEM = re.compile(r"-----BEGIN [^-\n]{0,64}-----.*?(?:-----END [^-\n]{0,64}-----|\Z)", re.DOTALL)
# The text before the last @ of an authority; and a password that was not quoted and has a / ? or #, which ends it.
_USER = re.compile(r"(?<=://)(?:[^\s/?#]+@|[^\s/?#@:\[\]]*:(?!\d{1,5}(?:[/?#]|$))[^\s@]{1,256}@)")
_QUOTED = r""""(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?"""
_MEMBER = re.compile(
    rf"""(?<![^\s?&;,#"'{{(\[])(?P<name>[^\s=&?;,#"'{{}}()\[\]]{{1,100}})=(?P<value>{_QUOTED}|[^\s&;#"']+)"""
)
_ITEM = re.compile(
    rf"""(?P<quote>["'])(?P<name>[^"'\\\s]{{1,100}})(?P=quote)\s{{0,8}}:\s{{0,8}}(?P<value>{_QUOTED}|[^\s,{{}}\[\]"']+)"""
)
_STRING = re.compile(_QUOTED)
_FRAME = re.compile(
    r'(?P<indent>[ |]*)File "[^"]+", line \d+(?:, in .+)?$'
)  # a line of a traceback; its source is behind it
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s\"',;]+")
_KNOWN = re.compile(
    r"(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]*"  # a JWT: {" in base64
    r"|(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|(?<![A-Za-z0-9_])(?:hf_|gh[opusr]_|github_pat_|ew_)\w{6,}"
    r"|(?<![A-Za-z0-9])(?:sk-|xox[a-z]?-)[\w-]{6,}"
)


def without_secrets(path: str | tuple[str, ...], value: Any) -> Any:
    """The value of a setting, or of a model's option, with each secret in it masked: all that is under a name that says
    secret, in tables and lists too, and what is one by its form, wherever it is. `path` is its name, or the names that
    lead to it in a configuration. A bool is none under any name."""
    name = path if isinstance(path, str) else path[-1]
    return _masked(value, says_secret(name) and path not in _FILES)


def _masked(value: Any, secret: bool) -> Any:
    if isinstance(value, dict):
        return {inner: _masked(item, secret or says_secret(str(inner))) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_masked(item, secret) for item in value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return MASK if secret and value else text_without_secrets(value)
    return MASK if secret and isinstance(value, int | float) else value


def says_secret(name: str) -> bool:
    """True if a word of a name says that its value is a secret: `db_pass`, `secretkey`, `hfToken`, `connection-string`; but
    not `eos_token` and `max_new_tokens`."""
    words = [word.lower() for word in _WORD.findall(name)]
    for at, word in enumerate(words):
        if word in ("string", "strings") and at and words[at - 1] == "connection":
            return True
        found = None if word in _NOT_THOSE else _SAYS_SECRET.search(word)
        if found is None:
            continue
        if not found["token"]:
            return True
        before = word[: found.start()]
        if before:
            of_text = _RUN_TOGETHER.fullmatch(before) is not None
        else:
            of_text = (at > 0 and words[at - 1] in _MARKS) or not _COUNTS.isdisjoint(words[:at])
        if not of_text:
            return True
    return False


def text_without_secrets(text: str) -> str:
    """A text with what is a secret by its form masked: users and passwords of URLs, values of members whose names say
    secret (`?api_key=x`, `password=x`, `"token": "x"`), PEM blocks, bearer tokens, JWTs, and keys that begin as those of
    AWS, Hugging Face, OpenAI, GitHub, Slack and this gateway do. In the source lines of a traceback only what is written out
    can be a secret: `token="x"` is masked, `token=next(tokens)` is not."""
    if 'File "' not in text:
        return _masked_text(text)
    told, source, indent = list[str](), list[str](), None
    done: list[str] = []

    def flush(lines: list[str], mask: Callable[[str], str]) -> None:
        if lines:
            done.append(mask("\n".join(lines)))
            lines.clear()

    for line in text.split("\n"):
        if (frame := _FRAME.match(line)) is not None:
            flush(source, _masked_source)
            told.append(line)
            indent = len(frame["indent"])
        elif indent is not None and len(line) - len(line.lstrip(" |")) > indent:
            flush(told, _masked_text)
            source.append(line)
        else:
            flush(source, _masked_source)
            told.append(line)
            indent = None
    flush(source, _masked_source)
    flush(told, _masked_text)
    return "\n".join(done)


def _masked_text(text: str) -> str:
    text = _PEM.sub(MASK, text)
    text = _USER.sub(f"{MASK}@", text)
    text = _MEMBER.sub(_member, text)
    text = _ITEM.sub(_member, text)
    return _KNOWN.sub(MASK, _BEARER.sub(rf"\1{MASK}", text))


def _masked_source(lines: str) -> str:
    lines = _PEM.sub(MASK, lines)
    lines = _USER.sub(lambda found: found[0] if "{" in found[0] else f"{MASK}@", lines)
    lines = _MEMBER.sub(_literal, lines)
    lines = _ITEM.sub(_literal, lines)
    lines = _STRING.sub(lambda found: _MEMBER.sub(_in_string, found[0]), lines)
    return _KNOWN.sub(MASK, _BEARER.sub(lambda found: found[0] if "{" in found[0] else f"{found[1]}{MASK}", lines))


def _in_string(found: re.Match[str]) -> str:
    return found[0] if found["value"].startswith("{") else _member(found)


def _literal(found: re.Match[str]) -> str:
    return _member(found) if len(found["value"]) > 2 and found["value"][0] in "\"'" else found[0]


def _member(found: re.Match[str]) -> str:
    value = found["value"]
    if not value or not says_secret(unquote_plus(found["name"])):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{found[0].removesuffix(value)}{quote}{MASK}{quote}"
