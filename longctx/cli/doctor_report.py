"""Report of `longctx doctor`: sections of names and values, problems, and hints."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_CHARACTERS = 300
"""Most characters that are shown of what others say."""


class Finding(NamedTuple):
    """A problem or a hint, and what to do about it."""

    text: str
    remedy: str


@dataclass
class Report:
    """Findings of a run.

    Attributes:
      sections: values by their names, by section.
      problems: what is broken. hints: what works, but not as well as it could.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)
    hints: list[Finding] = field(default_factory=list)

    def note(self, section: str, name: str, value: object) -> None:
        """Add a value to a section."""
        self.sections.setdefault(section, {})[name] = str(value)

    def problem(self, text: str, remedy: str) -> None:
        """Something is broken."""
        self.problems.append(Finding(text, remedy))

    def hint(self, text: str, remedy: str) -> None:
        """Something works, but not as well as it could."""
        self.hints.append(Finding(text, remedy))

    @contextmanager
    def asking(self, what: str, remedy: str) -> Iterator[None]:
        """Within it, whatever goes wrong is a problem, and what was found before stays."""
        try:
            yield
        except Exception as error:
            said = ": ".join(filter(None, (type(error).__name__, first_line(str(error)))))
            self.problem(f"{what} can't be found out: {said}", remedy)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add what another process has found, as from `to_dict`."""
        for section, values in other["sections"].items():
            for name, value in values.items():
                self.note(section, name, value)
        self.problems += [Finding(**each) for each in other["problems"]]
        self.hints += [Finding(**each) for each in other["hints"]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = {"problems": self.problems, "hints": self.hints}
        return {"sections": self.sections} | {name: [each._asdict() for each in found[name]] for name in found}

    def to_json(self) -> str:
        """For bug reports; ASCII alone."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        """For people: a line for each value, and for each problem and hint."""
        lines: list[str] = []
        for section, values in self.sections.items():
            width = max(map(len, values)) + 2
            lines += [section, *(f"  {name:<{width}}{value}" for name, value in values.items()), ""]
        for title, findings in (("problem", self.problems), ("hint", self.hints)):
            lines += [f"{title}: {each.text}: {each.remedy}" for each in findings]
        return "\n".join(lines if self.problems or self.hints else [*lines, "no problems"])


def first_line(text: str) -> str:
    """The first line that says something, not longer than `MAX_CHARACTERS`."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}..."


def shown(path: str | Path) -> str:
    """A path as a report has it, on one line: the home folder is `~`, so that a bug report doesn't tell whose it is."""
    try:
        text = str("~" / Path(path).relative_to(Path.home()))
    except (RuntimeError, ValueError):
        text = str(path)
    return text if text.isprintable() else json.dumps(text)
