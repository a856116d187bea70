"""Google's form of docstrings, as the documentation's site reads it, divided into sections and entries."""

import re

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Source", "Examples")
_HEADER = re.compile(rf"({'|'.join(SECTIONS)}):\s*(.*)")
_ENTRY = re.compile(r"([\w*\\]+(?:, [\w*\\]+)*):(?:\s|$)")


def sections(doc: str) -> dict[str, list[str]]:
    """The lines of each section, without their indentation; those before the first section are under ""."""
    found: dict[str, list[str]] = {"": []}
    name, before = "", ""
    for line in doc.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header[1]
            assert not header[2], f"the text of {name}: must be on lines of its own, indented"
            assert not before.strip(), f"there must be an empty line before {name}:"
            assert name not in found, f"there are two sections {name}:"
            found[name] = []
        elif name and line and not line.startswith(" "):
            raise AssertionError(f"text after the section {name}: {line!r}; sections come last")
        else:
            found[name].append(line[2:] if name else line)
        before = line
    order = [name for name in found if name]
    assert order == sorted(order, key=SECTIONS.index), f"sections must be in the order {', '.join(SECTIONS)}: {order}"
    return found


def entries(lines: list[str]) -> dict[str, str]:
    """The text of each name of a section such as Args; an entry may have several names, `k, v: ...`."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if line and not line.startswith(" "):
            entry = _ENTRY.match(line)
            assert entry, f"must begin with names and a colon, or be indented further: {line!r}"
            names = entry[1].replace("\\", "").split(", ")
            repeated = [name for name in names if name in found]
            assert not repeated, f"described twice: {repeated}"
            found |= dict.fromkeys(names, line[entry.end() :])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found
