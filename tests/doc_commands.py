"""The commands in the documentation, and a folder in which they run: tiny local models under the names of those on the hub.

A command is a line of a shell block, or a span of code in the text that starts as a command does.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "DocCommand", "block_commands", "inline_commands", "lay_out"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("stoker", "make", "python", "python3", ".venv/bin/python", "pip", "mpirun", "podman")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_MARK = re.compile(r"needs (the hub|a cluster)")


@dataclass(frozen=True)
class DocCommand:
    page: str
    line: int
    text: str
    """Without its comment."""
    mark: str = ""
    """What the page says that the command needs: "the hub" or "a cluster"."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def block_commands(page: Path) -> list[DocCommand]:
    """The commands in shell blocks. Output has no prompt; in a block with prompts, only lines with one are commands."""
    text = page.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        if block[1] not in ("", "bash"):
            continue
        body = re.sub(r"\s*\\\n\s*", "\0", block[2])  # one command on several lines
        number = text.count("\n", 0, block.start()) + 2
        prompts = re.search(r"^\$ ", body, re.M) is not None
        mark = ""
        for line in body.split("\n"):
            comment = re.search(r"(^|\s)#\s.*", line)
            marked = _MARK.search(comment[0]) if comment else None
            command = (line[: comment.start()] if comment else line).replace("\0", " ").strip()
            if line.startswith(" "):
                pass  # output, or a drawing
            elif not command:
                mark = marked[1] if marked else ""  # a comment of its own is about the lines below it
            elif not prompts or command.startswith("$ "):
                command = command.removeprefix("$ ")
                parts = [
                    part for part in re.split(r" && | \| ", command) if part.split()[0] in PROGRAMS and "──" not in part
                ]
                found += [DocCommand(page.name, number, part.strip(), marked[1] if marked else mark) for part in parts]
            number += 1 + line.count("\0")
    return found


def inline_commands(page: Path) -> list[DocCommand]:
    """Spans of code in the text that are commands with options."""
    text = page.read_text()
    text = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    found = []
    for span in re.finditer(r"`([^`]+)`", text):
        command = " ".join(span[1].replace("\\|", "|").split())
        if command.split()[0] in PROGRAMS and " -" in command:
            found.append(DocCommand(page.name, text.count("\n", 0, span.start()) + 1, command))
    return found


def lay_out(folder: Path) -> None:
    """Models, data and scripts by the names that the pages use, all tiny."""
    from tasks.language_models import save_tiny_llama, write_chats
    from tasks.models import save_tiny_bert
    from tasks.sentence_files import rows_of, sentence, write_lines

    for name in ("bert-base-uncased", "bert-base-cased", "sentence-transformers/all-MiniLM-L6-v2",
                 "cross-encoder/ms-marco-MiniLM-L6-v2"):  # fmt: skip
        save_tiny_bert(folder / name)
    save_tiny_llama(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    texts = [sentence(number) for number in range(24)]
    pairs = [f"{number % 2}\t{number}\t{number + 1}\t{text}\t{text}" for number, text in enumerate(texts)]
    labelled = [f'"{text}",{"late" if number % 2 else "damaged"}' for number, text in enumerate(texts)]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *pairs]) + "\n")
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *labelled]) + "\n")
        (folder / f"{name}.conll").write_text("Ada B-PER\nlives O\nin O\nTorwick B-LOC\n\n" * 12)
        articles = [{"title": "t", "paragraphs": [_paragraph(number) for number in range(12)]}]
        (folder / f"{name}-v1.1.json").write_text(json.dumps({"data": articles}))
    write_lines(folder / "pairs.jsonl", rows_of("pairs"))
    write_lines(folder / "dev.jsonl", rows_of("pairs"))
    write_chats(folder / "chat.jsonl")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(
        "\n".join(texts * 60) + "\n"
    )  # a few percent of them are kept for evaluation
    for name in ("notes.txt", "mails.txt", "letter.txt", "question.txt"):
        (folder / name).write_text("\n".join(texts[:8]) + "\n")
    for name in ("run_qa.py", "nlp_example.py", "train.py"):
        (folder / name).write_text("import os\nprint('rank', os.environ.get('RANK', '0'))\n")


def _paragraph(number: int) -> dict[str, object]:
    from tasks.sentence_files import sentence

    context = sentence(number)
    answer = {"text": "painted", "answer_start": context.index("painted")}
    return {"context": context, "qas": [{"id": str(number), "question": "What happened?", "answers": [answer]}]}
