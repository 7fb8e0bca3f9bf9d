"""Words, numbers and bytes that often break programs."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence

__all__ = ["damage", "number", "text", "value", "word"]

_PATHS = ["/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "/proc/1/environ", "/", ".", "..", "../../etc/passwd",
          "~", "~nouser/x", "x/" * 200, "n" * 300, "/nonexistent/x", "file:///etc/passwd", "out\udcff", "a b", "loop",
          "empty"]  # fmt: skip
_SHELL = ["$(touch pwned)", "`touch pwned`", "; touch pwned", "| touch pwned", "&& touch pwned", "'", '"', "\\", "$HOME",
          "a\ntouch pwned", "{}", "%s%n", "{0.__class__}", "*", "a:b", ":", "!", "#"]  # fmt: skip
_TEXTS = ["", " ", "\t", "\n", "-", "--", "--=", "=", "-x", "--x=", "☃", "e\u0301", "\u202e", "\x1b[31mred", "\x07", "\udc80",
          "x" * 10_000, "null", "None", "true", "False", "yes", "no", "[]", "{", "<script>", "ß", "İ", "a,b,c", ",",
          "\ufeff", "\u2028"]  # fmt: skip
_NUMBERS = ["0", "-0", "-1", "1", "2", "3", "7", "65535", "65536", "99999", str(2**31), str(2**63), str(2**64), "9" * 5000,
            "1e400", "-1e400", "1e-400", "1e308", "inf", "-inf", "nan", "NaN", "0.5", ".5", "1.", "1_0", "0x10", "0b1", "007",
            "+1", " 1", "1 ", "²", "٣", "１２", "½", "1,5", "1:2", "2:1", "1..4", "1-2", "1e5"]  # fmt: skip


def number(r: random.Random) -> str:
    return r.choice(_NUMBERS) if r.random() < 0.8 else str(r.randint(-(10 ** r.randint(1, 20)), 10 ** r.randint(1, 20)))


def text(r: random.Random) -> str:
    """A random string, control characters and lone surrogates included, without NUL."""
    ranges = ((32, 126), (1, 31), (0xA0, 0x2FF), (0x600, 0x6FF), (0xD800, 0xDFFF), (0x1F300, 0x1F5FF))
    weights = (10, 1, 2, 1, 1, 1)
    chosen = r.choices(ranges, weights, k=r.randint(0, 20))
    return "".join(chr(r.randint(first, last)) for first, last in chosen)


def value(r: random.Random) -> str:
    """Anything."""
    return r.choice((number, lambda r: r.choice(_PATHS), lambda r: r.choice(_SHELL), lambda r: r.choice(_TEXTS), text))(
        r
    )


def word(r: random.Random) -> str:
    """A valid argument of a command line: no NUL, and bytes that are not UTF-8 as lone surrogates."""
    return "".join(
        c if not 0xD800 <= ord(c) <= 0xDFFF else chr(0xDC80 + ord(c) % 128) for c in value(r).replace("\0", "")
    )


def damage(r: random.Random, data: bytes, tokens: Sequence[bytes] = ()) -> bytes:
    """The bytes of a file, damaged in one way."""
    for _ in range(r.choice((1, 1, 1, 2, 5))):
        data = r.choice(_DAMAGES)(r, data)
    if tokens and r.random() < 0.5:
        at = r.randint(0, len(data))
        data = data[:at] + r.choice(tokens) + data[at:]
    return data


def _flip(r: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    at = r.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << r.randrange(8))]) + data[at + 1 :]


def _cut(r: random.Random, data: bytes) -> bytes:
    return data[: r.randint(0, len(data))]


def _remove(r: random.Random, data: bytes) -> bytes:
    first, last = sorted((r.randint(0, len(data)), r.randint(0, len(data))))
    return data[:first] + data[last:]


def _repeat(r: random.Random, data: bytes) -> bytes:
    first = r.randint(0, len(data))
    part = data[first : first + r.randint(1, 40)]
    return data[:first] + part * r.choice((2, 3, 50)) + data[first:]


def _insert(r: random.Random, data: bytes) -> bytes:
    at = r.randint(0, len(data))
    parts = (
        b"\0",
        b"\xff\xfe",
        b"\r",
        b"\n",
        b"\t",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\x1b[2J",
        b'"',
        b"}",
        b"]",
        b",",
    )
    return data[:at] + r.choice(parts) + data[at:]


def _encode(r: random.Random, data: bytes) -> bytes:
    try:
        return data.decode().encode(r.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037")))
    except UnicodeError:
        return data


def _replace(r: random.Random, data: bytes) -> bytes:
    """Replaces one word by another."""
    parts = data.split(b" ")
    parts[r.randrange(len(parts))] = value(r).encode("utf-8", "surrogatepass")
    return b" ".join(parts)


_DAMAGES = (_flip, _flip, _cut, _remove, _repeat, _insert, _insert, _encode, _replace, _replace,
            lambda r, data: b"", lambda r, data: r.randbytes(r.randint(1, 300)), lambda r, data: gzip.compress(data))  # fmt: skip
