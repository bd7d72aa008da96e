"""Tokenised text on disk, and training windows read from it.

Flow of `pack`: `Documents` (units that can be read alone) -> `encoder` (text to ids) -> `writers` (processes that each
claim a unit under a file lock) -> `token_files` (files of ids, written once) -> `splitting` (which documents are held
out, and where token t of a part lies) -> `windows` (items of a data set) -> `order` (which item comes when) and
`flattening` (a batch as one row). `tokenising` drives the first half: it reads what exists and makes what is missing.
"""
