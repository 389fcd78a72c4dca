"""Reads HTML pages as strictly as XML, for tests."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})
_REFERENCES = frozenset({"src", "href", "xlink:href", "srcset", "action", "data"})


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        references: What it refers to by an attribute.
        headings: The texts of its headings, in order.
        tables: For each figure, how many tables it holds.
        text: Its text.
        tags: How often each tag occurs.

    Raises:
        AssertionError: Its elements are not nested properly.
    """

    def __init__(self, content: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.headings: list[str] = []
        self.tables: list[int] = []
        self.text = ""
        self.tags: dict[str, int] = {}
        self._open: list[str] = []
        self.feed(content)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.references += [value or "" for name, value in attrs if name in _REFERENCES]
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "figure":
            self.tables.append(0)
        if tag == "table" and "figure" in self._open:
            self.tables[-1] += 1
        if tag in {"h1", "h2", "h3"}:
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1] == tag, f"</{tag}> closes <{self._open[-1]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in {"h1", "h2", "h3"}:
            self.headings[-1] += data
