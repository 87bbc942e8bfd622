"""MkDocs hook: pages of the site that lie outside docs/, tutorials with their outputs, and links between them.

README.md is the site's first page. A link to a file of the repository that is no page of the site becomes plain text.
Formulas become MathML, which browsers draw by themselves. Pages of results are added to the navigation. In a search
they and the tutorials come behind the pages that explain a term.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"

# Pages from outside docs/, or under another name: path in the repository -> page
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
}
IMAGES = (".png", ".svg")
SMALL = ("images/speed.png", "images/copy_learning.png")  # drawn for a phone
LAST_IN_SEARCH = ("tutorials/", "results/", "changelog", "cpu-", "cuda-", "triton-", "gpu", "testing", "releasing")
LAST_IN_SEARCH += ("contributing",)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^()\s]+)\)")
CODE = re.compile(r"^```.*?^```\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
IMAGE = re.compile(r'(?:<a [^>]*>)?<img (?P<attributes>[^>]*src="(?P<source>[^"]+\.png)"[^>]*)>(?:</a>)?')


def page_of(path: str) -> str:
    """The page of the site for a path in the repository; "" if there is none."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/tutorials/") and path.endswith((".py", ".ipynb")):
        return str(Path(path).relative_to("docs").with_suffix(".md"))
    if path.startswith("docs/") and path.endswith((".md", *IMAGES)):
        return path.removeprefix("docs/")
    if path.startswith("docs/") and (ROOT / path / "README.md").is_file():
        return path.removeprefix("docs/").rstrip("/") + "/README.md"
    return f"repository/{path}" if path.endswith(IMAGES) else ""


def linked(markdown: str, origin: str, page: str) -> str:
    """Rewrite the relative links of a text for its place in the site.

    Args:
        markdown: the text.
        origin: its path in the repository, "docs/modal.md".
        page: its path in the site, "modal.md".
    """

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        there = page_of(os.path.normpath(Path(origin).parent / target))
        if not there:
            return match["text"]
        relative = os.path.relpath(there, Path(page).parent)
        return f"{match['image']}[{match['text']}]({relative}{'#' + anchor if anchor else ''})"

    # Code is put aside, and put back into the text of links before these are rewritten.
    code: list[str] = []

    def aside(match: re.Match[str]) -> str:
        code.append(match[0])
        return f"\0{len(code) - 1}\0"

    text = LINK.sub(replaced, CODE.sub(aside, markdown))
    text = re.sub(r"(?<=\d) (?=\d{3}\b)", "\u202f", text)  # 10 000 stays on one line
    return re.sub("\0(\\d+)\0", lambda match: code[int(match[1])], text)


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown of a notebook with its outputs, and the images that it shows by name."""
    import base64

    parts, images = ["---\nhide: [toc]\n---"], {}  # room for lines of 120 columns
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append("```text\n" + "".join(output["text"]).rstrip() + "\n```")
            elif "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(images)}.png"
                images[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![output of the code above]({name})")
    return "\n\n".join(parts) + "\n", images


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and images that do not lie under docs/."""
    from mkdocs.structure.files import File

    for origin, page in PAGES.items():
        if origin != "docs/README.md":
            files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        text, images = notebook_page(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    for path in sorted((ROOT / "bench" / "results").glob("*.png")):
        place = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, f"repository/{place}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    place = page.file.src_uri
    if place == "index.md":
        page.meta["hide"] = ["navigation"]  # it would have one entry
    origin = next((origin for origin, other in PAGES.items() if other == place), f"docs/{place}")
    return linked(markdown, origin, place)


def on_config(config: Any) -> Any:
    """Add the pages of results to the navigation, under the headings of docs/results/README.md."""
    (section,) = [entry["Results"] for entry in config["nav"] if "Results" in entry]
    text = (RESULTS / "README.md").read_text()
    for title, table in re.findall(r"^\*\*(.+)\*\*\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        names = re.findall(r"\(([\w-]+)\.md\)", table)
        section.append({title: [{name: f"results/{name}.md"} for name in names]})
    return config


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Set the formulas, link images to themselves, and lower results and internals in the search."""
    import html as entities

    from latex2mathml.converter import convert

    def formula(match: re.Match[str]) -> str:
        display = "block" if match["tag"] == "div" else "inline"
        return convert(entities.unescape(match["tex"]).strip(), display=display)

    def figure(match: re.Match[str]) -> str:
        path = ROOT / "docs" / os.path.normpath(f"{page.url}/{match['source']}")
        width = int.from_bytes(path.read_bytes()[16:20], "big") if path.is_file() else 900  # of a PNG
        style = (
            "max-width: min(480px, 100%)" if match["source"].endswith(SMALL) else f"--least: {round(0.65 * width)}px"
        )
        image = f'<img {match["attributes"]} style="{style}">'
        return f'<span class="figure"><a href="{match["source"]}">{image}</a></span>'

    if page.file.src_uri.startswith(LAST_IN_SEARCH):
        page.meta["search"] = {"boost": 0.2}
    html = FORMULA.sub(formula, html).replace("Example::", "Example:")
    return IMAGE.sub(figure, html)
