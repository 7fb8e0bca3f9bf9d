"""Tag schemes: how the tags of words mark entities. Training uses IOB2, IOBES or BILOU; IOB1 and plain types become IOB2.

IOB2: B- on the first word of an entity, I- on the others. IOBES adds E- on the last one and S- for entities of one word; BILOU
calls these L- and U-. IOB1 writes B- only between neighbours of the same type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stoker.errors import UserError

__all__ = ["OUTSIDE", "Scheme", "iob2", "recognise", "span_tags", "type_of"]

OUTSIDE = "O"


@dataclass(frozen=True)
class Scheme:
    name: str
    """seqeval's name of it."""
    prefixes: str
    source: str = ""
    """The form of the tags in the data, if they have to be converted: "IOB1" or "types"."""

    @property
    def seqeval(self) -> Any:
        import seqeval.scheme

        return getattr(seqeval.scheme, self.name)

    def labels(self, types: Iterable[str]) -> tuple[str, ...]:
        """All tags of these types: one that the training data happens to lack may occur in other data."""
        return (OUTSIDE, *(f"{prefix}-{one}" for one in sorted(types) for prefix in self.prefixes))

    def convert(self, tags: Sequence[str]) -> tuple[str, ...]:
        """The tags of a sentence in this scheme; ValueError with the reason if they are not valid."""
        if self.name == "IOB2":
            return iob2(tags)
        if wrong := self._wrong_pair(tags):
            raise ValueError(f"{wrong[1]} follows {wrong[0]}, which is not valid {self.name}")
        return tuple(tags)

    def _wrong_pair(self, tags: Sequence[str]) -> tuple[str, str] | None:
        """Two neighbours that cannot follow each other: an entity is open after B- and I-, and must be continued."""
        begin, inside, end = (self.prefixes[i] for i in range(3))
        for before, after in pairwise(["the beginning", *tags, "the end"]):
            is_open = before[:2] in (f"{begin}-", f"{inside}-")
            continues = after[:2] in (f"{inside}-", f"{end}-")
            if is_open != continues or (is_open and before[2:] != after[2:]):
                return before, after
        return None


_SCHEMES = (Scheme("IOB2", "BI"), Scheme("IOBES", "BIES"), Scheme("BILOU", "BILU"))


def type_of(tag: str) -> str:
    """The entity type of a tag that has a prefix; types may contain hyphens."""
    return tag.partition("-")[2]


def _is_prefixed(tag: str) -> bool:
    return len(tag) > 2 and tag[1] == "-" and tag[0] in "BIESLU"


def recognise(sentences: Iterable[Sequence[str]]) -> Scheme:
    """The scheme of the tags of some data; UserError if they are no entity tags."""
    stray = 0
    found: set[str] = set()
    for tags in sentences:
        found.update(tags)
        stray += sum(a[2:] != b[2:] for a, b in pairwise([OUTSIDE, *tags]) if b.startswith("I-"))
    if OUTSIDE not in found:
        some = ", ".join(sorted(found)[:5])
        raise UserError(
            f"the tags ({some}) are not those of entities: no word has the tag O; is another column the one with the tags "
            "(--label_column_name)?"
        )
    marked = found - {OUTSIDE}
    if not marked:
        raise UserError("the data has no entities: every tag is O")
    if not all(map(_is_prefixed, marked)):
        return Scheme("IOB2", "BI", source="types")
    prefixes = {tag[0] for tag in marked}
    scheme = next((one for one in _SCHEMES if prefixes <= {*one.prefixes}), None)
    if scheme is None:
        raise UserError(
            f"the tags have the prefixes {', '.join(sorted(prefixes))}, which fit none of IOB1, IOB2, IOBES and BILOU"
        )
    return Scheme("IOB2", "BI", source="IOB1") if scheme.name == "IOB2" and stray else scheme


def iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags of any scheme, and plain types, as IOB2: an entity begins at B-, and where the word before is not of its type."""
    done: list[str] = []
    before = ""
    for tag in tags:
        prefix, kind = (tag[0], tag[2:]) if _is_prefixed(tag) else ("I", tag)
        kind = "" if tag == OUTSIDE else kind
        begins = prefix in "BSU" or kind != before
        done.append(f"{'B' if begins else 'I'}-{kind}" if kind else OUTSIDE)
        before = kind
    return tuple(done)


def span_tags(words: Sequence[tuple[int, int]], entities: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
    """IOB2 tags of words from the entities (begin, end, type) in characters; every entity begins and ends with a word."""
    starts = {begin: (end, kind) for begin, end, kind in entities}
    tags: list[str] = []
    until, kind = 0, ""
    for begin, _ in words:
        if begin in starts:
            until, kind = starts[begin]
            tags.append(f"B-{kind}")
        else:
            tags.append(f"I-{kind}" if begin < until else OUTSIDE)
    return tuple(tags)
