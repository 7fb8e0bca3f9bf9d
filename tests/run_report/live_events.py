"""A reader of the live page's stream of changes, for tests."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Events"]


class Events:
    """A reader of the stream, with the parts of the page as it would show them."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self.connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=300)
        self.connection.request("GET", place.path + "events")
        self.answer = self.connection.getresponse()
        assert self.answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        self.parts: dict[str, Any] = {}

    def next(self) -> str:
        """Reads one line and applies it."""
        line = self.answer.readline().decode().rstrip("\n")
        if line.startswith("data: "):
            self.parts |= json.loads(line[6:])
        return line

    def until(self, text: str, part: str = "tiles") -> None:
        while text not in str(self.parts.get(part)):
            self.next()

    def rest(self) -> list[str]:
        lines = []
        while line := self.answer.readline():
            lines.append(line.decode().rstrip("\n"))
            if lines[-1].startswith("data: "):
                self.parts |= json.loads(lines[-1][6:])
        return lines
