"""Reads, writes and compares result folders: tables, one JSON document, one page. Needs no torch."""

from fulldepth.results.comparison import compare
from fulldepth.results.differences import difference_errors, paired_rows
from fulldepth.results.document import FRAMEWORKS, SCHEMA_VERSION, Finding, provenance, versions
from fulldepth.results.folder import (
    DOCUMENT,
    GROUPS,
    PAGE,
    TABLE,
    Results,
    TableMismatchError,
    check_free,
    claimed,
    finite,
    holder,
)
from fulldepth.results.influences import gathered, groups_entry, groups_of, joined_influences
from fulldepth.results.pages import Chapter, report, unique_names, write_index
from fulldepth.results.table import COLUMNS, stacked, tabulate
from fulldepth.results.verdict import difference_finding, difference_in_words

__all__ = [
    "COLUMNS",
    "DOCUMENT",
    "FRAMEWORKS",
    "GROUPS",
    "PAGE",
    "SCHEMA_VERSION",
    "TABLE",
    "Chapter",
    "Finding",
    "Results",
    "TableMismatchError",
    "check_free",
    "claimed",
    "compare",
    "difference_errors",
    "difference_finding",
    "difference_in_words",
    "finite",
    "gathered",
    "groups_entry",
    "groups_of",
    "holder",
    "joined_influences",
    "paired_rows",
    "provenance",
    "report",
    "stacked",
    "tabulate",
    "unique_names",
    "versions",
    "write_index",
]
