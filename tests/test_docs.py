"""What README, tutorial and gallery say, against the results in `docs/gallery/`; links and options that exist.

Numbers are read without fulldepth.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import BaseModel
from scipy.stats import norm

from causes_in_docs import sentences_on_causes
from data.conftest import jsonl
from families import zoo
from json_files import read_json
from pages import DOCS, GALLERY, figures, page, prose_of, states_no_number, text
from places import ROOT
from skip.word_tokenizer import tokenizer, words

_spec = importlib.util.spec_from_file_location("generated_pages", DOCS / "generated_pages.py")
generated_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generated_pages)
NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "Gemma 3 270M", "minilm": "MiniLM-L6"}
OTHERS = {"--no-deps", "--nproc-per-node"}
"""Options of pip and torchrun that the pages name; those of our scripts are read from them."""
DIGITS = {"zeta_L": 2, "zeta_L-1": 2, "zeta_L-2": 2, "last_layer_displacement": 4, "mean_coherence": 4}


def points(name):
    """Key -> value of a file of stored points."""
    lines = (GALLERY / f"{name}.jsonl").read_text().splitlines()
    return {point["key"]: point["value"] for point in map(json.loads, lines)}


class Measured:
    """The numbers of a gallery folder."""

    def __init__(self, name):
        folder = GALLERY / name
        self.meta = read_json(folder / "results.json")
        assert not Path(self.meta["model"]["name"]).is_absolute()  # of the machine that measured it
        self.table = pd.read_parquet(folder / "results.parquet")
        self.layers = self.meta["model"]["num_layers"]
        self.psi, self.error = (self.of("displacement", name) for name in ("mean", "standard_error"))

    def of(self, measure, statistic):
        rows = self.table.query("measure == @measure and statistic == @statistic and site == 'residual'")
        return dict(rows[rows.layer.notna()].set_index("layer").value)

    @property
    def middle(self):
        return median(value for layer, value in self.psi.items() if layer < self.layers)

    @property
    def idle(self):
        """Holm's step-down by hand, two-sided at 2 standard errors."""
        z = sorted(((0.02 - self.psi[layer]) / self.error[layer] for layer in self.psi), key=abs, reverse=True)
        count = 0
        for step, value in enumerate(z):
            if 2 * norm.sf(abs(value)) >= 2 * norm.sf(2) / (len(z) - step):
                break
            count += value > 0
        return count

    def late(self, last):
        """Share of the predictions that settle in the last layers, as it is printed."""
        layer = self.layers - last
        error = self.of("saturation", "standard_error_of_cumulative").get(layer)
        spread = "" if error is None else f" ± {100 * error:.0f}"
        return f"{100 - 100 * self.of('saturation', 'cumulative')[layer]:.0f}{spread} %"


def angle(displacement):
    return math.acos(1 - 2 * displacement) * 180 / math.pi


def shown(value, error, digits):
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def row(model, source):
    rows = [line for line in (DOCS / "gallery.md").read_text().splitlines() if line.startswith(f"| {model}, ")]
    (cells,) = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows if f"| {source} |" in line]
    return cells


@pytest.mark.parametrize("name", NAMES)
def test_the_gallerys_table_is_the_results(name):
    measured, findings = Measured(name), Measured(name).meta["headline"]
    cells = row(NAMES[name], "built-in")
    assert cells[0] == f"{NAMES[name]}, {measured.layers}"
    expected = [shown(findings[k]["value"], findings[k].get("standard_error"), d) for k, d in DIGITS.items()]
    assert [*cells[2:6], cells[7]] == expected
    assert cells[6] == f"{measured.middle:.3f}"
    for cell, finding, kind in zip(
        cells[8:], ("median_saturation", "effective_depth"), ("median", "relative_eps=0.05"), strict=True
    ):
        if finding not in findings:
            assert cell == "-"
            continue
        ends = [measured.table[measured.table.statistic == f"{end}_of_{kind}"].value for end in ("low", "high")]
        interval = f" ({ends[0].iloc[0]:.0f} to {ends[1].iloc[0]:.0f})" if len(ends[0]) else ""
        assert cell == f"{findings[finding]['value']:.0f}{interval}"


@pytest.mark.parametrize("name", NAMES)
def test_lambadas_rows_are_stored(name):
    known = read_json(GALLERY / "lambada.json")[name]
    cells = row(NAMES[name], "LAMBADA")
    assert cells[2:6] == [shown(*known[key], digits) for key, digits in DIGITS.items() if key in known]
    assert cells[6] == f"{known['median']:.3f}"
    assert cells[7:] == ["-"] * 3


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_gallerys_paragraphs(name):
    measured = Measured(name)
    paragraph = text("docs/gallery.md", "gallery: models").split(f"**{NAMES[name]}**")[1].split("- **")[0]
    most = sorted(measured.psi.items(), key=lambda pair: -pair[1])[:4]
    assert f"below 0.02 ({angle(0.02):.1f} degrees) in {measured.idle} of {measured.layers} layers" in paragraph
    assert ", ".join(f"{layer} ({psi:.2f})" for layer, psi in most) + "." in paragraph
    if name == "minilm":
        return
    last = range(measured.layers - 2, measured.layers + 1)
    right, loss = (measured.of(f"lens_{kind}", "mean") for kind in ("accuracy", "loss"))
    errors = [measured.of(f"lens_{kind}", "standard_error")[last[-1]] for kind in ("accuracy", "loss")]
    assert f" {measured.late(1)} of the predictions become final in the last layer, {measured.late(2)} in" in paragraph
    assert (
        "{:.1f}, {:.1f} and {:.1f} ± {:.1f} %".format(*(100 * right[at] for at in last), 100 * errors[0]) in paragraph
    )
    assert "{:.2f}, {:.2f} and {:.2f} ± {:.2f} nats".format(*(loss[at] for at in last), errors[1]) in paragraph
    windows = (measured.meta["token_policy"]["begin_with_bos"], measured.meta["data"]["sequences"])
    assert "BOS token: {} of {}.".format(*windows) in paragraph


def test_what_the_gallery_says_in_words():
    small, gemma = Measured("smollm2"), Measured("gemma")
    printed = {
        cells[0]: cells[1] for cells in re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", page("gallery"), re.MULTILINE)
    }
    low, high = float(printed["Qwen3-32B"]), float(printed["DeepSeek-7B"])
    paper = float(printed["the authors' Llamas of 170M, 1B, 3.4B"].split(",")[0])
    assert max(low, paper) < small.meta["headline"]["zeta_L"]["value"] < high
    assert gemma.psi[gemma.layers] + 2 * gemma.error[gemma.layers] < gemma.middle
    assert gemma.of("saturation", "cumulative")[gemma.layers - 2] < 0.5
    how = text("docs/gallery.md", "gallery: table")
    data, sampled = small.meta["data"], small.meta["sampling"]
    assert f"{data['sequences']} windows of {data['sequence_length']} tokens" in how
    assert f"read {sampled['lens_positions']:,} of" in how
    assert f"on {small.meta['created'][:10]} in {small.meta['model']['dtype']}" in how


def test_the_readmes_first_numbers():
    measured = Measured("smollm2")
    last = measured.psi[measured.layers]
    sentence = text("README.md", "gallery: smollm2")
    assert f"{measured.idle} of its {measured.layers} layers is clearly below 0.02 (an angle of 16 degrees)" in sentence
    ratio = angle(last) / angle(measured.middle)
    assert (
        f"is {shown(last, measured.error[measured.layers], 3)} ({angle(last):.0f} degrees, {ratio:.1f} times"
        in sentence
    )
    assert f"{measured.late(1)} of the predictions become final" in sentence
    assert round(angle(0.02)) == 16
    spread = [measured.error[measured.layers]]
    spread += [
        v for k, v in measured.of("saturation", "standard_error_of_cumulative").items() if k == measured.layers - 1
    ]
    assert len(figures(sentence.split("The [gallery]")[0].replace("SmolLM2-135M", ""))) == 8 + len(spread)


def test_every_number_of_the_tutorial():
    """The sentences are written again from the stored results; what is left of the prose states no number."""
    m = Measured("smollm2")
    found, last, middle = m.meta["headline"], m.layers, m.middle
    after = {
        int(v.layer): v.value for v in m.table[m.table.site == "final_normed"].query("statistic == 'mean'").itertuples()
    }
    right, loss = (m.of(f"lens_{kind}", "mean") for kind in ("accuracy", "loss"))
    errors = [m.of(f"lens_{kind}", "standard_error")[last] for kind in ("accuracy", "loss")]
    tail = range(last - 2, last + 1)
    data, sampled, parameters = m.meta["data"], m.meta["sampling"], m.meta["model"]["parameters"]
    assert abs(angle(found["last_layer_displacement"]["value"]) - angle(m.psi[last])) < 1e-9
    assert found["median_saturation"]["value"] == last - 1
    assert found["effective_depth"]["value"] == last
    config = {"width": 576, "key_value_width": 192}  # of SmolLM2-135M, as its model card states
    attention = 2 * config["width"] ** 2 + 2 * config["width"] * config["key_value_width"] + config["width"]
    cache = 2 * 2 * config["key_value_width"]  # bytes of a token in a layer: keys and values in bfloat16
    assert m.meta["model"]["width"] == config["width"]
    removed = removals()
    first = (removed[k] for k in (1, 2, 3, 4, 8))
    assert all(abs(removed[k].added) < 2 * removed[k].error for k in (1, 2, 3))
    assert removed[4].added > 2 * removed[4].error
    sentences = [
        f"The model has {last} layers and {parameters / 1e6:.1f} million parameters.",
        f"{data['sequences']} windows of {data['sequence_length']} tokens are read",
        f"a sample of {sampled['lens_positions']:,} of the {sampled['lens_targets']:,} positions",
        f"standard error over {data['clusters']} blocks of text",
        "It runs from 0 to 1, and a right angle is 0.5.",
        f"The displacement of {m.idle} of {last} layers is clearly below 0.02, an angle of {angle(0.02):.0f} degrees.",
        f"Its displacement is {m.psi[1]:.3f}, an angle of {angle(m.psi[1]):.0f} degrees",
        f"Its displacement is {shown(m.psi[last], m.error[last], 3)}, an angle of {angle(m.psi[last]):.0f} degrees, "
        f"which is {angle(m.psi[last]) / angle(middle):.1f} times the angle of the median layer.",
        f"zeta_L is {shown(found['zeta_L']['value'], found['zeta_L']['standard_error'], 2)} %, and 10 counts as large.",
        f"The second value is {after[last]:.3f}, an angle of {angle(after[last]):.0f} degrees.",
        "After layers {}, {} and {} the next token is right in ".format(*tail)
        + "{:.1f}, {:.1f} and {:.1f} ± {:.1f} %, ".format(*(100 * right[at] for at in tail), 100 * errors[0])
        + "with a loss of {:.2f}, {:.2f} and {:.2f} ± {:.2f} nats.".format(*(loss[at] for at in tail), errors[1]),
        f"{m.late(1)} of the predictions become final only in the last layer.",
        f"Half of them are settled after layer {last - 1}, and no layer before the last has 95 % of its accuracy.",
        *(f"| {row.count} | layer {row.layer} | {row} |" for row in first),
        f"by {-removed[3].chosen:.3f} nats",
        f"The export has {(parameters - 3 * attention) / 1e6:.1f} million parameters instead of {parameters / 1e6:.1f}",
        f"{(last - 3) * cache:,} bytes a token instead of {last * cache:,}.",
        "(1 - cos) / 2",
        *sentences_on_causes(),
    ]
    prose = prose_of(page("tutorial"), r"`[^`]*`|\]\([^)]*\)", "SmolLM2-135M")
    for sentence in sentences:
        plain = prose_of(sentence, r"`[^`]*`")
        assert plain in prose, plain
        prose = prose.replace(plain, "")
    states_no_number(prose)
    given = ",".join(str(removed[k].layer) for k in (1, 2, 3))
    assert f"--given {given} " in page("tutorial")


class Removal(NamedTuple):
    """A row of the table of removed blocks in docs/results.md."""

    count: int
    layer: int
    chosen: float
    added: float
    error: float

    def __str__(self):
        return f"{self.added:+.3f} ± {self.error:.3f}"


def removals():
    """Number of removed blocks -> nats a token added, from the stored losses of every row."""
    stored = read_json(GALLERY / "removal.json")
    tokens, losses, choosing = (np.array(stored[name]) for name in ("tokens", "losses", "choosing"))
    rows = len(tokens)
    found = {}
    for count, layer in enumerate(stored["blocks"], 1):
        added = losses[count] - losses[0]
        value = added.sum() / tokens.sum()
        error = np.sqrt(rows / (rows - 1) * ((added - value * tokens) ** 2).sum()) / tokens.sum()  # of a ratio of sums
        found[count] = Removal(count, layer, choosing[count] - choosing[0], value, error)
    return found


def test_the_table_of_removed_blocks():
    stored = read_json(GALLERY / "removal.json")
    written = page("results")
    assert f"$ {stored['command']}\n" in written
    assert f"bfloat16, not healed, {stored['measured']}." in written
    assert f"added to {sum(stored['losses'][0]) / sum(stored['tokens']):.3f}," in written
    for row in removals().values():
        line = f"| {row.count} | {row.layer} | {row.chosen:+.3f} | {row} |\n"
        assert line in written, line


def test_the_frontier():
    """Loss added, its error and the ratios of times of every method, from the stored losses and times of every row."""
    stored = points("frontier")
    section = page("results").split("## SmolLM2-135M at 1.2 times the speed")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (1\.2|1\.19) \| (.*) \|$", section, flags=re.MULTILINE)
    chosen = {tuple(re.findall(r"by (.*), seed 0, for (.*)", key)[0]) for key in stored if "seed 0, for" in key}
    assert {(row.split(" | ")[0].split(" + ")[0], target) for target, row in lines} == chosen
    losses = sum(key.startswith("losses on text") for key in stored)
    assert len(lines) == losses - 1 - 4  # of the whole model; of the seeds 1 to 4
    for target, line in lines:
        name, removed, *cells = line.split(" | ")
        choice, _, healing = name.partition(" + ")
        seeds = [value for key, value in stored.items() if re.fullmatch(f"removed by {choice}, .* for {target}", key)]
        assert removed == f"{len(seeds[0]['attention'])} + {len(seeds[0]['mlp'])}"
        for kind, cell in zip(("text", "answers"), cells, strict=False):
            added = [added_loss(stored, kind, gone, healing) for gone in seeds]
            values = [value for value, _ in added]
            error = added[0][1] if len(added) == 1 else np.std(values, ddof=1)
            assert cell == f"{np.mean(values):+.3f} ± {error:.3f}", (name, kind)
        where = [(phase, context) for phase in ("decode", "prefill") for context in (128, 512)]
        for (phase, context), cell in zip(where, cells[2:], strict=True):
            times = stored.get(f"times of the models for {target}, context {context}")
            if times is None:
                parts = stored[f"times of the parts, context {context}"]
                saved = [
                    len(gone) / 30 * (1 - np.median(np.divide(parts[f"{part} {phase}"], parts[f"whole {phase}"])))
                    for part, gone in seeds[0].items()
                ]
                assert cell == f"{1 / (1 - sum(saved)):.2f}, predicted", (name, phase, context)
                continue
            ratios = np.sort(np.divide(times[f"whole {phase}"], times[f"{choice} {phase}"]))
            assert len(ratios) == 9  # the 2nd and the 8th of 9 hold the median with a probability of 0.961
            assert cell == f"{np.median(ratios):.2f} ({ratios[1]:.2f} to {ratios[7]:.2f})", (name, phase, context)


@pytest.mark.parametrize(("model", "layers"), [("SmolLM2", 30), ("Gemma 3", 18)])
def test_the_frontier_of_a_model_at_other_speeds(model, layers):
    stored = points(f"frontier-{model.split()[0].lower()}")
    parts, shares = stored["times of the parts, context 512"], {}
    for part in ("attention", "mlp"):
        shares[part] = (1 - np.median(np.divide(parts[f"{part} decode"], parts["whole decode"]))) / layers
    found = {}
    for key, gone in stored.items():
        names = re.fullmatch(r"removed by (.*), seed 0, for .*", key)
        if names is None or names[1] in ("last layers", "random layers"):
            continue
        speed = 1 / (1 - sum(shares[part] * len(own) for part, own in gone.items()))
        cells = [f"{len(gone['attention'])} + {len(gone['mlp'])}", f"{speed:.2f}"]
        for kind, healing in (("text", ""), ("text", "map"), ("text", "refit"), ("answers", ""), ("answers", "refit")):
            known = f"losses on {kind} without {json.dumps(gone)}{f', {healing}' if healing else ''}" in stored
            cells.append("{:+.3f} ± {:.3f}".format(*added_loss(stored, kind, gone, healing)) if known else "-")
        found.setdefault(json.dumps(gone), []).append(f"| {model} | {names[1]} | {' | '.join(cells)} |")
    lines = re.findall(rf"^\| {model} \| .*$", page("results"), flags=re.MULTILINE)
    assert len(lines) == len(found)
    assert all(any(line in lines for line in same) for same in found.values())  # two methods may choose the same


def added_loss(stored, rows, removed, healing):
    """Nats a token added, and the standard error of this ratio of sums over documents."""
    whole = stored[f"losses on {rows} without {{}}"]
    without = stored[f"losses on {rows} without {json.dumps(removed)}{f', {healing}' if healing else ''}"]
    rows_added = pd.DataFrame({"added": np.subtract(without["sums"], whole["sums"]), "tokens": whole["tokens"]})
    documents = rows_added.groupby(whole["documents"]).sum()
    value = documents.added.sum() / documents.tokens.sum()
    influences = (documents.added - value * documents.tokens) / documents.tokens.sum()
    count = len(documents)
    return value, float(np.sqrt(count / (count - 1) * (influences**2).sum()))


def test_numbers_of_the_readme_and_the_gallery_stand_in_the_pages_that_explain_them():
    readme, gallery, results, log = text("README.md"), page("gallery"), page("results"), page("log")
    removed = removals()
    assert [*sorted(removed)] == [*range(1, 13)]
    families = page("families")
    tested = families.count("| `") // 2 - families.count("| not tested |")  # two code cells a row
    assert f"[{tested} classes]" in readme
    assert f"{removed[3]} nats on rows that were not used" in readme
    assert f"eight cost {removed[8].added:.2f} nats" in readme
    assert ", ".join(str(removed[k].layer) for k in range(1, 5)) in gallery
    for number in (str(removed[4]), "+0.507 ± 0.024"):
        assert number in gallery
        assert number in results
    for k in (4, 8):
        assert f"**{removed[k].added:+.3f}** ({removed[k].error:.3f})" in results  # the table of searches
    before, after = re.findall(r"Gromov, groups(?: \+ refit)? \| 6 \+ 6 \| \+(0\.\d\d)", results)
    assert f"Six whole layers cost {before} nats" in readme
    assert f"[{after}](docs/results.md" in readme
    (cells,) = re.findall(r"SST-2, SmolLM2-135M, 120 steps \| 21 \| (.*?) ± .*? \| (.*?) ± ", log)
    (ends,) = re.findall(r"\| \| 30 \| (.*?) ± .*? \| (.*?) ± ", log)
    baseline, aligned = ([round(float(each[at])) for each in (cells, ends)] for at in (0, 1))
    assert f"right on {aligned[0]} % of the sentences after layer 21 of 30" in readme
    assert f"({aligned[1]} and {baseline[1]} % at the last layer" in readme
    assert baseline[0] == 52  # of two classes
    assert f"classified {aligned[0]} % of the sentences at layer 21 of 30, where the baseline answered at random" in log


def test_every_option_in_the_documentation_exists():
    """Each `fulldepth ...` in code takes the options that follow it; anywhere else an option is of some program."""
    known = dict(generated_pages.programs())
    takes = {name: {flag for p in c.params for flag in (*p.opts, *p.secondary_opts)} for name, c in known.items()}
    scripts = [
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "examples").glob("*.py"),
        *(ROOT / "tests" / "fuzz").glob("*.py"),
    ]
    stated = (re.findall(r'"(--[a-z][a-z0-9-]+)"', script.read_text()) for script in scripts)
    every = OTHERS.union(*takes.values(), *stated)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        if path.name == "families.md":
            continue
        written = path.read_text()
        strange = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", written)) - every
        assert not strange, (path.name, strange)
        for command in re.findall(r"^.*?\bfulldepth ((?:[^\n`#]|\\\n)+)", written, re.MULTILINE):
            names = [name for name in takes if re.match(rf"{name}\b", command)]
            flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", command))
            if names:
                wrong = flags - takes[max(names, key=len)] - {"--help"}
                assert not wrong, (path.name, command, wrong)


def test_every_extra_that_is_named_can_be_installed():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = re.findall(r"[`'](?:fulldepth|\.)\[([\w,-]+)\][`']", "".join(path.read_text() for path in files))
    named += re.findall(r'needing\("[\w-]+", "([\w-]+)"', "".join(path.read_text() for path in files))
    assert {extra for extras in named for extra in extras.split(",")} >= {"gguf", "lora", "sft", "evaluate"}
    assert {extra for extras in named for extra in extras.split(",")} <= declared.keys()


def test_every_setting_in_the_documentation_exists():
    classes = list(generated_pages.SETTINGS.values())
    known = {name for kind in classes for name in kind.model_fields}
    for path in (ROOT / "README.md", *DOCS.glob("*.md")):
        given = re.findall(r"--set '?([a-z_]+)[.=]", path.read_text())
        assert not (strange := set(given) - known - {"name", "key"}), (path.name, strange)


def test_generated_pages_list_every_command_setting_and_public_name():
    shown, listed = generated_pages.commands(), generated_pages.settings()
    known = dict(generated_pages.programs())
    assert set(generated_pages.SETTINGS) <= set(known)
    for name, command in known.items():
        assert f"\n## {name}\n" in shown
        for flag in (flag for p in command.params if p.param_type_name == "option" for flag in p.opts):
            assert f"`{flag}`" in shown
    for kind in generated_pages.SETTINGS.values():
        for name, field in kind.model_fields.items():
            assert f"`{name}`" in listed or f"`{name}." in listed
            assert field.description or isinstance(field.default, BaseModel), name
    nav = (ROOT / "mkdocs.yml").read_text()
    for name, content in generated_pages.api().items():
        assert name in nav
        assert content.count(":::") >= 1


@pytest.mark.parametrize(
    "path", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(p.name for p in DOCS.glob("*.md"))]
)
def test_relative_links_lead_somewhere(path):
    file = ROOT / path if (ROOT / path).exists() else DOCS / path
    links = re.findall(
        r"\]\(([^)\s#]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL)
    )
    made = {"changelog.md", "contributing.md", "commands.md", "settings.md"} if file.parent == DOCS else set()
    for link in set(links) - made:
        generated = re.fullmatch(r"gallery/([\w-]+)\.html", link)
        target = file.parent / (f"gallery/{generated[1]}/results.json" if generated else link)
        assert "://" in link or target.exists(), link


def test_the_text_is_made_by_the_benchmark(tmp_path, monkeypatch):
    """`benchmarks/gallery.py` alone writes the same text again."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gallery_text

    written = {}
    monkeypatch.setattr(gallery_text, "_between", lambda path, mark, made: written.update({(path.name, mark): made}))
    gallery_text.rewrite()
    for (name, mark), made in written.items():
        path = "README.md" if name == "README.md" else f"docs/{name}"
        assert text(path, f"gallery: {mark}") == " ".join(made.split()), "run python benchmarks/gallery.py"
    sys.modules.pop("gallery_text")


def test_the_table_of_families_is_of_the_version_that_make_installs():
    (stated,) = re.findall(r"classes of transformers ([\d.]+),", text("docs/families.md"))
    assert f"transformers=={stated}\n" in (ROOT / "constraints.txt").read_text()


def test_the_documentation_is_built_with_its_warnings():
    recipe = (ROOT / "Makefile").read_text().split("\ndocs:")[1].split("\n\n")[0]
    assert "--strict" in recipe
    assert "--quiet" not in recipe  # it hides warnings, and strict mode counts none


def test_the_snippet_on_skipping_runs_on_a_family_that_is_not_in_the_table(tmp_path, monkeypatch):
    """Cohere 2 adds both branches to one stream, which only the check of the parts finds."""
    rows = [{"prompt": words(n, n + 1), "response": " " + words(n + 2, n + 3)} for n in range(10)]
    jsonl(tmp_path / "pairs.jsonl", *rows)
    monkeypatch.chdir(tmp_path)
    model = zoo.build("cohere2", "causal-lm", num_hidden_layers=5)
    names = {"model": model, "tokenizer": tokenizer(), "inputs": {"input_ids": torch.tensor([[3, 4]])}}
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "skipping.md").read_text(), re.DOTALL)
    code, _, load = code.rpartition("model = load(")
    exec(code, names)
    assert load == '"fast/")\n'
    assert len(names["plan"].blocks) == 4
