"""Pages of the site that are no files of docs/: the repository's own pages, and the API reference.

Links from docs/ to a page of the repository's root lead to its copy in the site. Links to code show the path alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

#: Pages at the root of the repository, and their paths in the site.
ROOT_PAGES = {
    "README.md": "about.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}

#: Modules of the API reference: what a program or a policy of one's own imports.
API = {
    "Scheduler core": ["pdmesh.core.scheduler", "pdmesh.core.events", "pdmesh.core.commands"],
    "Instance machine": ["pdmesh.instance.machine", "pdmesh.instance.effects", "pdmesh.instance.sequence"],
    "Policies": ["pdmesh.policy.bundle", "pdmesh.policy.views", "pdmesh.policy.order", "pdmesh.policy.placement"],
    "Model": ["pdmesh.model", "pdmesh.kv_layout", "pdmesh.plans", "pdmesh.errors"],
}

LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages and one page of reference for each group of modules."""
    for source, path in ROOT_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text()))
    for group, modules in API.items():
        text = f"# {group}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
        files.append(File.generated(config, f"reference/{group.lower().replace(' ', '-')}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its links out of docs/ changed."""
    here = page.file.src_uri
    sources = {path: source for source, path in ROOT_PAGES.items()}
    folder = (ROOT / sources[here]).parent if here in sources else (ROOT / "docs" / here).parent

    def changed(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.is_relative_to(ROOT):
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        path = ROOT_PAGES.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(path) is None:
            return link[1]
        up = "../" * here.count("/")
        return f"[{link[1]}]({up}{path}{link[3] or ''})"

    return LINK.sub(changed, markdown)
