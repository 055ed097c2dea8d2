"""What the site does to its pages: letters stay letters, lists and tables get their blank line, notebooks are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import griffe
from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FETCHED = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=.https?://[^>]*>")


class Letters(Extension):
    """No HTML in pages: <t, X> is a product, and would vanish as a tag."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Take out what reads HTML."""
        md.inlinePatterns.deregister("html")
        md.preprocessors.deregister("html_block")


class Examples(griffe.Extension):
    """Lines that begin with >>> under a heading of their own: numpydoc reads code there, and elsewhere a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write the heading that docstrings do without."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\n\n(?=>>> )", "\n\nExamples\n--------\n", obj.docstring.value, count=1)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read every page with `Letters`."""
    config.markdown_extensions.append(Letters())  # type: ignore[arg-type]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Part lists and tables from the line above: GitHub does, Python-Markdown waits for a blank line."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        before = lines[-1] if lines else ""
        begins = re.match(r"([-*] |\d+\. |\| )", line)
        if begins and not fenced and before.strip() and not re.match(r"([-*] |\d+\. |\||\s|#)", before):
            lines.append("")
        fenced ^= line.startswith("```")
        lines.append(line)
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page for every notebook, beside the notebook itself."""
    for path in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        name = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, name, content=page_of(path)))
    return files


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that a browser would fetch something for."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches {found[0]}; expected what the site holds itself")
    return output


def page_of(path: Path) -> str:
    """The cells of a notebook and what they printed, one below the other, and where to get it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shown = []
    for cell in cells:
        text = "".join(cell["source"])
        shown.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = [part.get("text") or part["data"]["text/plain"] for part in cell.get("outputs", [])]
        shown += ["```text\n" + "".join(lines).rstrip() + "\n```" for lines in printed]
    return "\n\n".join([*shown, f"[Download this notebook]({path.name}). The tests run it."])
