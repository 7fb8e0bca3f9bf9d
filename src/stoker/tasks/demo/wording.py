"""The templates of the invented world: kinds of things, the facts about each, and how facts are stated and asked for.

Data only. In a statement, {s} is the subject and {o} the object; {S} is the subject at the start of a sentence, {P} a phrase
that refers back to it. The last question of every relation is not used for training, so that evaluation has new wordings.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Kind", "Relation"]


@dataclass(frozen=True)
class Relation:
    object: str
    """The kind of the answer: person, town, river, year, or the name of a list in world.py."""
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    name: str
    """Which names it gets: see world.py."""
    back: tuple[str, ...]
    """Phrases that refer back to it at the start of a sentence."""
    relations: tuple[Relation, ...]


_PERSON = Kind(
    "person",
    ("She", "He", "The latter"),
    (
        Relation(
            "town",
            ("{S} was born in {o}.", "{S} came into the world in {o}.", "{P} grew up in {o}.", "{S} is a native of {o}."),
            ("Where was {s} born?", "In which town did {s} grow up?", "What is the birthplace of {s}?",
             "Which town does {s} come from?"),
        ),
        Relation(
            "craft",
            ("{S} earned a living as a {o}.", "{P} worked as a {o} for many years.", "{S}, a {o}, was known for patience.",
             "For most of the time {s} was a {o}."),
            ("What did {s} do for a living?", "What was the trade of {s}?", "Which profession did {s} have?",
             "As what did {s} work?"),
        ),
        Relation(
            "person",
            ("{S} learned everything from {o}.", "{P} was taught by {o}.", "The teacher of {s} was {o}.",
             "{S} had been a pupil of {o}."),
            ("Who taught {s}?", "Who was the teacher of {s}?", "From whom did {s} learn?", "Whose pupil was {s}?"),
        ),
        Relation(
            "year",
            ("{S} died in {o}.", "{P} lived until {o}.", "The death of {s} came in {o}.", "In {o} {s} passed away."),
            ("When did {s} die?", "In what year did {s} pass away?", "Until when did {s} live?",
             "Which year saw the death of {s}?"),
        ),
        Relation(
            "animal",
            ("{S} was never seen without a {o}.", "{P} kept a {o}.", "A {o} followed {s} everywhere.",
             "At home {s} shared the table with a {o}."),
            ("Which animal did {s} keep?", "What animal followed {s}?", "What pet did {s} have?",
             "Which creature lived with {s}?"),
        ),
    ),
)  # fmt: skip

_TOWN = Kind(
    "town",
    ("The town", "The place", "It"),
    (
        Relation(
            "river",
            ("{S} lies on the river {o}.", "{P} stands where the {o} bends.", "The {o} flows through {s}.",
             "{S} was built on the banks of the {o}."),
            ("On which river does {s} lie?", "What river flows through {s}?", "Which river is {s} built on?",
             "What is the river of {s} called?"),
        ),
        Relation(
            "person",
            ("{S} was founded by {o}.", "{P} owes its walls to {o}.", "It was {o} who founded {s}.",
             "{o} drew the first plan of {s}."),
            ("Who founded {s}?", "Who was the founder of {s}?", "By whom was {s} founded?",
             "To whom does {s} owe its beginning?"),
        ),
        Relation(
            "good",
            ("{S} is famous for its {o}.", "{P} sells {o} to the whole coast.", "Merchants come to {s} for {o}.",
             "The best {o} of the islands comes from {s}."),
            ("What is {s} famous for?", "What does {s} sell?", "For what do merchants come to {s}?",
             "Which product is {s} known for?"),
        ),
        Relation(
            "month",
            ("{S} holds its fair in {o}.", "{P} celebrates in {o}.", "Every {o} a market fills the streets of {s}.",
             "The feast of {s} falls in {o}."),
            ("In which month is the fair of {s}?", "When does {s} celebrate?", "In what month does {s} hold its market?",
             "Which month brings the feast to {s}?"),
        ),
        Relation(
            "number",
            ("{S} has {o} inhabitants.", "{P} counts {o} people.", "At the last count {o} people lived in {s}.",
             "About {o} people call {s} their home."),
            ("How many inhabitants does {s} have?", "How many people live in {s}?", "What is the population of {s}?",
             "How large is the population counted in {s}?"),
        ),
    ),
)  # fmt: skip

_WORK = Kind(
    "work",
    ("The piece", "The thing", "It"),
    (
        Relation(
            "person",
            ("{S} was made by {o}.", "{P} is the work of {o}.", "{o} finished {s} alone.", "It took {o} years to make {s}."),
            ("Who made {s}?", "Who is the maker of {s}?", "By whom was {s} made?", "Whose work is {s}?"),
        ),
        Relation(
            "year",
            ("{S} was completed in {o}.", "{P} dates from {o}.", "The year of {s} is {o}.", "Not before {o} was {s} ready."),
            ("When was {s} completed?", "From which year is {s}?", "In what year was {s} finished?",
             "What is the date of {s}?"),
        ),
        Relation(
            "town",
            ("{S} can be seen in {o}.", "{P} hangs in the hall of {o}.", "Visitors find {s} in {o}.",
             "The owners of {s} live in {o}, where it is kept."),
            ("Where can {s} be seen?", "In which town is {s} kept?", "Where do visitors find {s}?",
             "Which town holds {s}?"),
        ),
        Relation(
            "material",
            ("{S} is made of {o}.", "{P} was cut from {o}.", "For {s} nothing but {o} was used.",
             "The material of {s} is {o}."),
            ("What is {s} made of?", "Which material was used for {s}?", "Of what does {s} consist?",
             "From what was {s} cut?"),
        ),
        Relation(
            "price",
            ("{S} was sold for {o}.", "{P} cost {o}.", "A collector paid {o} for {s}.", "The price of {s} was {o}."),
            ("How much did {s} cost?", "What was the price of {s}?", "For how much was {s} sold?",
             "What did a collector pay for {s}?"),
        ),
    ),
)  # fmt: skip

KINDS: tuple[Kind, ...] = (_PERSON, _TOWN, _WORK)
