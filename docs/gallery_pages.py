"""Pages of the gallery: a MkDocs hook that renders every result folder below `docs/gallery/` as `gallery/NAME.html`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fulldepth.reporting import render
from fulldepth.results import Results

GALLERY = Path(__file__).parent / "gallery"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """MkDocs: add one file for each result folder."""
    for folder in sorted(path for path in GALLERY.iterdir() if path.is_dir()):
        page = render(Results.load(folder), f"Its rows are in docs/gallery/{folder.name} of the source.")
        files.append(File.generated(config, f"gallery/{folder.name}.html", content=page))
    return files
