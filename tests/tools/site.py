"""MkDocs calls these functions while `make docs` builds the site.

They bring in the pages and pictures that lie outside `docs/`, write the page of the public names, whose text is that of
their docstrings, and turn links as a git host follows them, from file to file, into links of the site; those to code
lead to the repository.
"""

import os
import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import alpaca_ppo
from alpaca_ppo.config.git_state import package_pages

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/**/*.md", "examples/**/*.png")

BOOSTS = {"configuration.md": 2, "troubleshooting.md": 2, "api.md": 0.5, "CHANGELOG.md": 0.5}
"""How much a page that holds a searched word is preferred; 1 where nothing is said."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """`files` with what lies outside `docs/`, at its path in the repository, a page of the public names and a style."""
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "api.md", content=api_page()))
    # Room for code of 100 columns; on a narrower screen its lines are wrapped, so that no comment is cut off.
    style = ".md-grid { max-width: 76rem } .md-typeset pre > code { white-space: pre-wrap; overflow-wrap: anywhere }"
    files.append(File.generated(config, "site.css", content=style))
    return files


def api_page() -> str:
    """The public names and the modules of `functional`, for each of which mkdocstrings puts in the docstrings."""
    mathematics = sorted(path.stem for path in (ROOT / "alpaca_ppo/functional").glob("[!_]*.py"))
    parts = [
        "# Python",
        "What `import alpaca_ppo` offers. The options of the configuration classes have "
        "[a page of their own](configuration.md), the hooks of the trainer [another](customization.md).",
        *(f"::: alpaca_ppo.{name}{_members(name)}" for name in alpaca_ppo.__all__ if not name.startswith("_")),
        "## The mathematics",
        "`alpaca_ppo.functional` offers the functions of these modules. "
        "Masks are bool, and True counts; what lies outside a mask affects neither results nor gradients.",
        *(f"::: alpaca_ppo.functional.{name}" for name in mathematics),
    ]
    return "\n\n".join(parts)


def _members(name: str) -> str:
    return "\n    options: {members: false}" if name.endswith(("Config", "Arguments")) else ""


@cache
def origin() -> str | None:
    """The address that this repository was cloned from, if it is on the web."""
    address, blob, _ = (package_pages() or "").partition("/blob/")
    return address if blob else None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of `page` with its links as the site needs them, and without what fences say to the tests alone."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri, 1)}
    source = page.file.abs_src_path
    if source is None:
        return markdown

    repository = config.extra["repository"] or origin() or "https://github.com/OWNER/alpaca_ppo"

    def of_the_site(link: re.Match[str]) -> str:
        target = (Path(source).parent / link[1]).resolve()
        if not target.exists():
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        if files.get_file_from_path(path.removeprefix("docs/")):
            return os.path.relpath(path.removeprefix("docs/"), Path(page.file.src_uri).parent)
        return f"{repository}/{'tree' if target.is_dir() else 'blob'}/main/{path}"

    markdown = re.sub(r"^(```\w+) [\w-]+$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])", of_the_site, markdown)
