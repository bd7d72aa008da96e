"""The YAML that settings are written in: plain values without aliases, tags, deep nesting and long numbers.

PyYAML reads it, with the stricter rules of `_Loader`. ruamel.yaml would only replace the patterns of numbers and the
check for repeated keys; aliases, merge keys, dates, non-text keys, `%YAML 1.1`, deep nesting and long numbers would
still need code here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from fulldepth.core.errors import one_line

MOST_DEPTH = 32
"""Deepest nesting of settings."""
MOST_DIGITS = 40
"""Digits of the longest integer."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: only true/false are booleans (`no` is text), 1e-3 and inf are numbers, dates are text.

    Aliases (nine short lines can expand to a billion values), tags, deep nesting and very long numbers are refused.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node; anchors, aliases, tags and nesting deeper than `MOST_DEPTH` are errors."""
        event: Any = self.peek_event()
        refused = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            refused = f"the anchor or alias {one_line(event.anchor, 60)!r}; write the value again instead"
        elif getattr(event, "tag", None) is not None:  # some constructors of PyYAML fail with any exception
            refused = f"the tag {one_line(event.tag, 60)!r}; write the value without it"
        elif self.depth > MOST_DEPTH:
            refused = f"it is nested deeper than {MOST_DEPTH} levels"
        if refused:
            raise yaml.composer.ComposerError(None, None, refused, event.start_mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """An integer of at most `MOST_DIGITS` digits."""
        if len(node.value) > MOST_DIGITS:
            refused = f"a number of {len(node.value):,} digits"
            raise yaml.constructor.ConstructorError(None, None, refused, node.start_mark)
        return super().construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping with unique text keys (PyYAML silently keeps the last of repeated ones)."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{one_line(key.value, 100)!r} appears twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_EXPONENT = r"(?:[eE][-+]?[0-9]+)"
_PLAIN = {  # type -> pattern of its scalars, and their possible first characters
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", [*"-+0123456789"]),
    "float": (
        rf"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*){_EXPONENT}?|[0-9]+{_EXPONENT}|\.?inf)|\.nan",
        [*"-+.0123456789i"],
    ),
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: text that is a number in YAML 1.2, such as `1e-3`, is quoted like that of 1.1."""


for _first_character, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _tag, _regular_expression in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _regular_expression, [_first_character])


def as_yaml(values: Mapping[str, Any]) -> str:
    """Nested plain values as YAML from which `parse` restores them."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def as_flow(value: Any) -> str:
    """One value as YAML in one line, from which `parse` restores it."""
    flow = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True)
    return flow.removesuffix("\n").removesuffix("\n...")


def parse(text: str) -> Any:
    """The plain values that a YAML text holds.

    Raises:
        yaml.YAMLError, ValueError: if it is no such text.
    """
    return yaml.load(text, Loader=_Loader)


def parse_value(text: str) -> Any:
    """The value of a `key=value` argument. Text with a `#` that YAML takes for a comment, such as a path, is kept."""
    node = yaml.compose(text, Loader=_Loader)
    end = 0 if node is None else node.end_mark.index
    return text.strip() if text[end:].lstrip().startswith("#") else parse(text)
