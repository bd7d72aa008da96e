"""Pages made from other files: a MkDocs hook.

Every result folder below `docs/gallery/` becomes `gallery/NAME.html`; `CHANGELOG.md` and `CONTRIBUTING.md` become
pages, with links that hold below `docs/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fulldepth.reporting import render
from fulldepth.results import Results

DOCS = Path(__file__).parent
GALLERY = DOCS / "gallery"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """MkDocs: add the pages."""
    for folder in sorted(path for path in GALLERY.iterdir() if path.is_dir()):
        results = Results.load(folder)
        page = render(results.table, results.meta, f"Its rows are in docs/gallery/{folder.name} of the source.")
        files.append(File.generated(config, f"gallery/{folder.name}.html", content=page))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (DOCS.parent / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files
