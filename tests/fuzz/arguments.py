"""Mutations of the command line itself, from the options that the program says it has."""

# ruff: noqa: SIM905  # odd words read best in one line
from __future__ import annotations

import re
from typing import NamedTuple

NUMBERS = ["", " ", *"0 -1 -0 1.5 nan inf -inf 1e400 text 0x10 1_0 ² ٣ true null".split()]
HUGE = [*"99999999999999999999 9223372036854775808 -99999999999999999999 1e30".split(), "9" * 5000]
TEXTS = ["", " ", "naïve ✓ \u202e\U0001f600", "\udcff\udcfe", "line\nline", "x" * 300, "y" * 100_000]
TEXTS += ", ,,a,, - -- = a=b null [1,2 {a:1} %s%d{0} ~ $HOME * NaN 1 __proto__ ../.. a/b/c".split()
TEXTS += "https://example.com/x corpus:nothing corpus:builtin".split()
ODD_PATHS = ["", "naïve ✓", "\udcff", "x" * 300, "a/" * 500, *"missing . data model out-a pipe loop - ~/none".split()]
READ = [*ODD_PATHS, *"data/text.txt data/pairs.jsonl model/config.json model/config.json/x recipes/train.yaml".split()]
READ += "model/model.safetensors /dev/null /dev/zero /dev/stdin /proc/self/mem".split()
WRITE = [*ODD_PATHS, *"missing/deep/er run data/text.txt model/config.json model/config.json/x".split()]
WRITE += "/dev/null/x /proc/none --".split()
"""Places to write to: inside the case, or where nothing can be written (tests may run as root)."""
SETTINGS = ["", *"seed steps blocks dtype device anatomy anatomy.blocks data.name model epochs".split()]
SETTINGS += "model.hidden_size objective.jump report_to workers chunks nonsense".split()
KEPT = {"--help", "-h", "--version", "--debug", "--trust-remote-code", "--list", "--dry-run"}
"""Options that are not added: they end the command, or give the consent that others must not have."""
OUTPUTS = {"--output", "-o"}


class Option(NamedTuple):
    """An option as `--help` shows it."""

    names: list[str]
    kind: str
    """int, float, str, path, bool or list[str]."""


def options_in(help_text):
    """The options that a command's `--help` lists."""
    found = re.findall(r"^│ [* ]? *(-.*?)\s+<([\w\[\]]+)>", help_text, re.MULTILINE)
    return [Option(names.split(), kind.lower()) for names, kind in found]


def value_for(rng, option):
    """An odd value for an option."""
    if set(option.names) & OUTPUTS:
        return rng.choice(WRITE)
    if option.kind in ("int", "float"):
        return rng.choice([*NUMBERS, *HUGE])
    if "--set" in option.names:
        return setting(rng)
    return rng.choice([rng.choice(READ), rng.choice(TEXTS), rng.choice([*NUMBERS, *HUGE])])


def setting(rng):
    """`key=value`, or what looks like it."""
    value = rng.choice([*map(rng.choice, (NUMBERS, HUGE, TEXTS, READ)), "[" * 5000, "&a [*a]"])
    return rng.choice([f"{rng.choice(SETTINGS)}={value}", value, f"{rng.choice(SETTINGS)}.{value}=1"])


def head_of(argv):
    """The words that name the command."""
    return argv[: 2 if argv[0] == "skip" or argv[:2] == ["train", "export"] else 1]


def mutate(rng, argv, help_text):
    """Change one thing about the arguments; the command stays."""
    head = head_of(argv)
    rest = argv[len(head) :]
    options = [option for option in options_in(help_text) if not set(option.names) & KEPT]
    valued = {name: option for option in options if option.kind != "bool" for name in option.names}
    present = [i for i, word in enumerate(rest[:-1]) if word in valued]
    positions = [i for i, word in enumerate(rest) if not word.startswith("-") and (i == 0 or rest[i - 1] not in valued)]
    how = rng.choice(["value", "value", "value", "add", "add", "add", "drop", "repeat", "position", "position", "odd"])
    if how == "value" and present:
        i = rng.choice(present)
        value = value_for(rng, valued[rest[i]])
        return [*head, *rest[: i + 1], value, *rest[i + 2 :]], f"{rest[i]} {value[:60]!r}"
    if how == "position" and positions:
        i = rng.choice(positions)
        value = setting(rng) if "=" in rest[i] else rng.choice(READ)
        return [*head, *rest[:i], value, *rest[i + 1 :]], f"{value[:60]!r} in place of {rest[i]}"
    if how == "drop" and rest:
        i = rng.randrange(len(rest))
        return [*head, *rest[:i], *rest[i + 1 :]], f"without {rest[i]}"
    if how == "repeat" and rest:
        i = rng.randrange(len(rest))
        return [*head, *rest, rest[i]], f"{rest[i]} again"
    if how == "add" and options:
        option = rng.choice(options)
        name = rng.choice(option.names)
        words = [name] if option.kind == "bool" else [name, value_for(rng, option)]
        return [*head, *rest, *words], f"with {name} {words[-1][:60]!r}"
    extra = rng.choice(["", *"--nonsense -z extra --output= --data=data/text.txt -o -- key=1 seed=x".split()])
    return [*head, *rest, extra], f"with {extra!r}"
