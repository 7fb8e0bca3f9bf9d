"""Generates a SQuAD-format data set about an invented world of people, towns and works with made-up names.

Every context describes three things of the same kind, with some facts about each in varying words and order, so that each
question has two distractors of the right type. A model that does not read the text cannot guess the answer. The same seed
gives the same world.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from stoker.tasks.demo.wording import KINDS, Kind, Relation
from stoker.tasks.qa.data import Question

__all__ = ["Asked", "as_squad", "ask_world", "make_world"]

_BEGINNINGS = ("Bal", "Dor", "El", "Fen", "Gar", "Hal", "Ist", "Jor", "Kel", "Lum", "Mar", "Nev", "Or", "Pel", "Quin",
               "Ras", "Sel", "Tor", "Ul", "Vel", "Wen", "Yar", "Zan")  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "an", "el", "in", "or", "us")
_ENDINGS = {
    "first": ("dra", "lin", "mir", "na", "ric", "sa", "ta", "vin", "wyn"),
    "last": ("brook", "dell", "field", "ford", "hart", "man", "stone", "ward", "wood"),
    "town": ("burg", "by", "cliff", "gate", "haven", "holm", "mouth", "port", "stead", "ton", "wick"),
    "river": ("ane", "esk", "ira", "orn", "une", "ware"),
}
_LISTS: dict[str, tuple[str, ...]] = {
    "craft": ("glassblower", "clockmaker", "bell founder", "lighthouse keeper", "map drawer", "rope maker", "bookbinder",
              "beekeeper", "lens grinder", "ship's cook", "tax collector", "stone carver", "court singer", "bridge builder"),
    "animal": ("grey parrot", "tame fox", "black goat", "one-eyed cat", "white raven", "small monkey", "huge tortoise",
               "lame dog", "barn owl", "red squirrel"),
    "good": ("blue glass", "salted plums", "silk rope", "smoked cheese", "copper lamps", "sea salt", "painted tiles",
             "dark honey", "tall candles", "woollen coats", "dried figs"),
    "month": ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
              "November", "December"),
    "material": ("black marble", "cedar wood", "river clay", "whale bone", "green jade", "old iron", "white linen",
                 "beaten silver", "oak and brass", "volcanic glass"),
    "thing": ("clock", "mural", "harp", "globe", "tapestry", "lantern", "statue", "mask", "atlas", "organ"),
    "quality": ("Silent", "Golden", "Broken", "Seventh", "Northern", "Sleeping", "Twin", "Winter", "Drowned", "Crooked"),
}  # fmt: skip
_FILLERS = (
    "Little else is certain.",
    "The archives of the islands burned twice.",
    "So at least the oldest chronicle says.",
    "Scholars have argued about this for a century.",
    "A copy of the record survives.",
)


@dataclass(frozen=True)
class _Names:
    random: random.Random

    def make(self, kind: str) -> str:
        chance = self.random
        if kind == "person":
            return f"{self._word('first')} {self._word('last')}"
        if kind in {"town", "river"}:
            return self._word(kind)
        if kind == "year":
            return str(chance.randint(1210, 1890))
        if kind == "number":
            return f"{chance.randint(2, 98)},{chance.randint(0, 999):03}"
        if kind == "price":
            return f"{chance.randint(2, 95) * 10} {chance.choice(('crowns', 'ducats', 'silver marks'))}"
        if kind == "work":
            return f"the {chance.choice(_LISTS['quality'])} {chance.choice(_LISTS['thing']).title()}"
        return chance.choice(_LISTS[kind])

    def _word(self, kind: str) -> str:
        middle = self.random.choice(_MIDDLES) if self.random.random() < 0.6 else ""
        return self.random.choice(_BEGINNINGS) + middle + self.random.choice(_ENDINGS[kind])

    def distinct(self, kind: str, count: int, but: tuple[str, ...] = ()) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = self.make(kind)
            if name not in found and name not in but:
                found.append(name)
        return found


@dataclass(frozen=True)
class Asked:
    """A question, with what it is about and which kind of thing answers it."""

    question: Question
    subject: str
    kind: str


def make_world(questions: int, *, seed: int, training: bool, per_context: int = 4) -> list[Question]:
    """`questions` questions about as many contexts as needed. Some wordings appear only if not `training`."""
    return [one.question for one in ask_world(questions, seed=seed, training=training, per_context=per_context)]


def ask_world(questions: int, *, seed: int, training: bool, per_context: int = 4) -> list[Asked]:
    """The same questions, with their subjects and kinds."""
    chance = random.Random(f"{seed}-{training}")
    names = _Names(chance)
    made: list[Asked] = []
    number = 0
    while len(made) < questions:
        kind = KINDS[number % len(KINDS)]
        made += _context(kind, names, f"{'train' if training else 'dev'}-{number}", training, per_context)
        number += 1
    return made[:questions]


def _context(kind: Kind, names: _Names, name: str, training: bool, per_context: int) -> list[Asked]:
    chance = names.random
    subjects = names.distinct(kind.name, 3)
    relations = chance.sample(kind.relations, 3)
    objects = {relation: names.distinct(relation.object, 3, tuple(subjects)) for relation in relations}
    parts: list[tuple[str, int, Relation | None, str]] = []  # sentence, subject, relation, object
    for about in chance.sample(range(3), 3):
        facts = chance.sample(relations, chance.choice((2, 2, 3)))
        for position, relation in enumerate(facts):
            statement = chance.choice(relation.statements)
            if position == 0:
                while "{P}" in statement:  # nothing to refer back to yet
                    statement = chance.choice(relation.statements)
            value = objects[relation][about]
            sentence = _sentence(statement, subjects[about], value, chance.choice(kind.back))
            parts.append((sentence, about, relation, value))
    if chance.random() < 0.5:
        parts.insert(chance.randrange(len(parts) + 1), (chance.choice(_FILLERS), -1, None, ""))
    context = " ".join(sentence for sentence, *_ in parts)
    questions = []
    starts = _starts(parts)
    candidates = [i for i, part in enumerate(parts) if part[2] is not None]
    for q, index in enumerate(chance.sample(candidates, min(per_context, len(candidates)))):
        sentence, about, fact, value = parts[index]
        assert fact is not None
        wordings = fact.questions[:-1] if training else fact.questions
        begin = starts[index] + sentence.index(value)
        text = chance.choice(wordings).format(s=subjects[about])
        question = Question(f"{name}-{q}", text, context, (value,), (begin,))
        questions.append(Asked(question, subjects[about], fact.object))
    return questions


def _sentence(statement: str, subject: str, value: str, back: str) -> str:
    sentence = statement.format(s=subject, S=subject[0].upper() + subject[1:], P=back, o=value)
    return sentence[0].upper() + sentence[1:]


def _starts(parts: list[tuple[str, int, Relation | None, str]]) -> list[int]:
    starts, at = [], 0
    for sentence, *_ in parts:
        starts.append(at)
        at += len(sentence) + 1
    return starts


def as_squad(questions: list[Question]) -> dict[str, Any]:
    """The official nested layout, one article per context."""
    contexts: dict[str, list[Question]] = {}
    for question in questions:
        contexts.setdefault(question.context, []).append(question)
    return {
        "version": "1.1",
        "data": [
            {
                "title": f"Invented world {number}",
                "paragraphs": [
                    {
                        "context": context,
                        "qas": [
                            {
                                "id": q.id,
                                "question": q.question,
                                "answers": [{"text": q.answers[0], "answer_start": q.starts[0]}],
                            }
                            for q in group
                        ],
                    }
                ],
            }
            for number, (context, group) in enumerate(contexts.items())
        ],
    }
