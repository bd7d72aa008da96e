"""What a source holds, as one hash: two sources are the same data if and only if it is equal."""

from __future__ import annotations

from fulldepth.data.records import Source, image_content
from fulldepth.data.sequences import Sequences
from fulldepth.fingerprint import Fingerprint


def content_hash(data: Source | Sequences) -> str:
    """sha256 over everything that is read of some data: texts, labels, images as they are stored; no names of files.

    Args:
        data: from `open_source` or `prepare`.

    Returns:
        `sha256:...`

    Raises:
        FulldepthError: if an image cannot be read.
    """
    if isinstance(data, Sequences):
        return data.hash
    fingerprint = Fingerprint(data.kind, str(len(data.class_names)), *data.class_names)
    for record in data.records:
        for text in (record.text, record.second, record.prompt, record.response):
            fingerprint.add(b"" if text is None else b"=" + text.encode("utf-8", "surrogatepass"))
        fingerprint.add(str(record.label).encode())
        fingerprint.add(b"" if record.image is None else b"=" + image_content(record.image))
    return str(fingerprint)
