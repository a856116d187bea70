"""A notebook as a page: its prose, its code, and what that printed and drew, as the notebook has stored it."""

import base64
import json
from pathlib import Path
from typing import Any

IMAGES = {"image/svg+xml": "svg", "image/png": "png"}


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page's Markdown, and its images by the names that it gives them, beside it."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else block("python", source))
        for output in cell.get("outputs", []):
            data: dict[str, Any] = output.get("data", {})
            kind = next((each for each in IMAGES if each in data), None)
            if kind is not None:
                name = f"{path.stem}_{len(images) + 1}.{IMAGES[kind]}"
                image = "".join(data[kind])
                images[name] = base64.b64decode(image) if kind == "image/png" else image.encode()
                parts.append(f"![What the code above draws]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(block("text", text))
    return "\n\n".join(parts) + "\n", images


def block(language: str, text: str) -> str:
    """A fenced block, or nothing where there is no text."""
    return f"~~~~~~{language}\n{text.rstrip()}\n~~~~~~" if text.strip() else ""
