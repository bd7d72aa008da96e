"""Mutations of the files of a case. Each is drawn from a seeded generator and described in words."""

from __future__ import annotations

import os
import shutil
import stat

from fuzz import binaries, documents

SUFFIXES = {
    ".json": [documents.json_file],
    ".jsonl": [documents.json_lines],
    ".yaml": [documents.yaml_file],
    ".safetensors": [binaries.safetensors_header, binaries.safetensors_weights],
    ".parquet": [binaries.parquet],
    ".png": [binaries.picture],
    ".pt": [binaries.pickled],
    ".pth": [binaries.pickled],
    ".bin": [binaries.pickled],
}
"""Mutations that know a format; they need a file that is still whole."""


def edit(rng, content):
    """Flip bits, overwrite, cut or insert bytes anywhere."""
    place = int(rng.random() * (len(content) + 1))
    how = rng.choice(["flip", "flip", "overwrite", "cut", "cut", "insert"])
    if how == "cut":
        return content[:place], f"cut to {place} of {len(content)} bytes"
    if how == "flip":
        changed = bytearray(content)
        places = [int(rng.random() * len(content)) for _ in range(rng.choice([1, 1, 2, 4, 16]) if content else 0)]
        for at in places:
            changed[at] ^= 1 << rng.randrange(8)
        return bytes(changed), f"flip bits in bytes {places}"
    if how == "overwrite":
        length = rng.choice([1, 4, 16, 256])
        text = rng.choice([rng.randbytes(length), *(byte * length for byte in (b"\x00", b"\xff", b"9", b"["))])
    else:
        length, text = (
            0,
            rng.choice([b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", b"NaN", *map(bytes, zip(b'\x00\n"{],\r'))]),
        )
    return content[:place] + text + content[place + length :], f"{how} {text[:4]!r} at {place}"


REPLACEMENTS = {
    "empty": lambda _: b"",
    "twice": lambda content: content * 2,
    "only white space": lambda _: b" \n\n",
    "only NUL bytes": lambda content: b"\x00" * len(content),
    "with a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "as UTF-16": lambda content: content.decode("utf-8", "replace").encode("utf-16"),
    "as Latin-1 with umlauts": lambda content: content.replace(b"a", b"\xe4"),
    "with Windows line ends": lambda content: content.replace(b"\n", b"\r\n"),
    "without line ends": lambda content: content.replace(b"\n", b""),
    "with a long line": lambda content: content + b"z" * 3_000_000 + b"\n",
    "null": lambda _: b"null",
    "a number": lambda _: b"42",
    "a list": lambda _: b"[]",
    "a mapping": lambda _: b"{}",
    "a deep list": lambda _: documents.RAW_TEXTS["deep list"].encode(),
    "an error page": lambda _: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "a Git LFS pointer": lambda _: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    ),
}


def replace(rng, content):
    how = rng.choice(list(REPLACEMENTS))
    return REPLACEMENTS[how](content), how


def change_content(rng, path):
    """Change what is in a file: half of the time in the terms of its format."""
    content = path.read_bytes()
    known = SUFFIXES.get(path.suffix, [])
    if known and rng.random() < 0.65:
        try:
            new, words = rng.choice(known)(rng, content)
        except Exception:  # an earlier mutation broke the format
            new, words = edit(rng, content)
    else:
        new, words = rng.choice([edit, edit, edit, replace])(rng, content)
    path.write_bytes(new)
    return words


def beside(rng, path):
    """Add a file or folder that a glob may find."""
    name = rng.choice(["checkpoint-9", "checkpoint-x", "adapter_config.json", "model.safetensors", "pytorch_model.bin"])
    name = rng.choice([name, ".hidden", "results.json", "progress.json", "naïve ✓", "model-00001-of-00002.safetensors"])
    new = path.parent / name
    if not new.exists():
        if rng.random() < 0.4:
            new.mkdir()
        else:
            new.write_bytes(rng.choice([b"", b"{}", b"text", b"\x80\x04N."]))
    return f"{name} beside it"


PLACES = {"delete": 4, "swap": 4, "link": 3, "pipe": 1, "folder": 2, "forbid": 1, "forbid folder": 1, "beside": 2}
"""What happens to a file as a whole, and how often."""
LINKS = ["/dev/zero", "/dev/stdin", "/dev/null", "/dev/urandom", "nowhere", "/proc/self/mem"]


def mutate_file(rng, targets):
    """Change one file of the groups in `targets`; each group is drawn as often.

    Returns:
        The file and, in words, what happened to it.
    """
    path = rng.choice(rng.choice([group for group in targets if group]))
    if path.is_file() and not path.is_symlink() and rng.random() < 0.8:
        return path, change_content(rng, path)
    if not (path.exists() or path.is_symlink()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        return path, "an empty file again"
    how = rng.choices(list(PLACES), list(PLACES.values()))[0]
    if how == "beside":
        return path, beside(rng, path)
    if how == "forbid":
        path.chmod(0)
        return path, "no permission to read"
    if how == "forbid folder":
        path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
        return path, f"no permission to write into {path.parent}"
    other = rng.choice([each for group in targets for each in group if each != path and each.is_file()] or [path])
    content = other.read_bytes() if other.is_file() else b""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if how == "swap":
        path.write_bytes(content)
        return path, f"content of {other}"
    if how == "link":
        path.symlink_to(target := rng.choice([*LINKS, path.name]))
        return path, f"symbolic link to {target}"
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    return path, how
