"""Benchmarks under load: who is asked what, ratios against plain sums, and what cannot be served."""

from __future__ import annotations

import itertools
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gguf_files
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.execution.latency import OtherLoad
from fulldepth.execution.llama_cpp import LlamaCpp
from fulldepth.execution.serving import LlamaServer, Load, VllmServer, in_llama_cpp
from fulldepth.hf import load_tokenizer
from fulldepth.results import Results
from fulldepth.skip.bench import bench
from fulldepth.skip.exports.export import export
from json_files import read_json
from refusals import refused
from reporting.synthetic import payload_of
from skip import planned
from skip.test_bench_gguf import tiny

VOCABULARY = 320
NAMES = ("full.gguf", "thin.gguf", "deep.gguf")
SMALL = {"contexts": [8], "max_new_tokens": 4, "repeats": 9, "warmup": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model as GGUF, without attention of one layer, and of two; a folder, and one of the format `fast`."""
    root = tmp_path_factory.mktemp("load")
    full = gguf_files.write(root / "full.gguf", tiny())
    gguf_files.without_attention(full, root / "thin.gguf", {2})
    gguf_files.without_attention(full, root / "deep.gguf", {2, 3})
    gguf_files.write(root / "wide.gguf", tiny(330))
    tiny().save_pretrained(root / "folder")
    (root / "tokens").mkdir()
    return root


@pytest.fixture
def asked(monkeypatch):
    """Every round of a model, in order, with times made of the model, the clients and the round."""
    calls = []
    cost = {"full.gguf": 1.0, "thin.gguf": 0.8, "deep.gguf": 0.9}
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)

    def serve(self, prompts, new_tokens, clients):
        name = self.model.path.name
        calls.append((name, clients, new_tokens, [list(prompt) for prompt in prompts]))
        number = sum(call[:2] == (name, clients) for call in calls)
        factor = cost[name] if clients == 1 else 1.7 - cost[name] if name != "full.gguf" else 1.0
        seconds = factor * (10 + number) * (1 + 0.001 * number * (name == "thin.gguf"))
        return Load(seconds, [0.1 * factor * (at + 1) for at in range(len(prompts))])

    monkeypatch.setattr(LlamaServer, "serve", serve)
    return calls


def value(results, measure, statistic, model, clients):
    """One number of the table."""
    rows = results.table.query("measure == @measure and statistic == @statistic and model == @model")
    (found,) = rows[rows["batch"] == clients]["value"]
    return found


def test_rates_and_ratios_are_those_of_the_rounds(files, asked, tmp_path):
    """Against sums written down here; every model answers the same prompts in every round."""
    results = bench(
        files / NAMES[0],
        [files / name for name in NAMES[1:]],
        tmp_path / "out",
        concurrency=[1, 4],
        requests=3,
        **SMALL,
    )
    assert len(asked) == 3 * 2 * 10
    for clients in (1, 4):
        rounds = [call for call in asked if call[1] == clients]
        assert len({str(call[2:]) for call in rounds}) == 1
        prompts = rounds[0][3]
        assert [len(prompt) for prompt in prompts] == [8] * (clients * 3)
        assert all(0 <= token < VOCABULARY for prompt in prompts for token in prompt)
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
        orders = [tuple(call[0] for call in rounds[at : at + 3]) for at in range(0, 30, 3)]
        assert all(sorted(names) == sorted(NAMES) for names in orders)
        assert {names[0] for names in orders} == set(NAMES)
    seconds = {1: {}, 4: {}}
    for clients, factors in {1: (1.0, 0.8, 0.9), 4: (1.0, 0.9, 0.8)}.items():
        for name, factor in zip(NAMES, factors, strict=True):
            seconds[clients][name] = [factor * (10 + k) * (1 + 0.001 * k * (name == "thin.gguf")) for k in range(2, 11)]
            tokens = 4 * 3 * clients
            rate = sorted(tokens / s for s in seconds[clients][name])[4]
            assert value(results, "output_rate", "median", name, clients) == pytest.approx(rate)
            firsts = [0.1 * factor * (at + 1) for at in range(3 * clients)] * 9
            assert value(results, "first_token_time", "median", name, clients) == pytest.approx(np.median(firsts))
            assert value(results, "first_token_time", "p95", name, clients) == pytest.approx(np.quantile(firsts, 0.95))
        for name, factor in zip(NAMES[1:], factors[1:], strict=True):
            ratios = sorted(a / b for a, b in zip(seconds[clients]["full.gguf"], seconds[clients][name], strict=True))
            got = [value(results, "rate_ratio", end, name, clients) for end in ("low", "median", "high")]
            assert got == pytest.approx([ratios[1], ratios[4], ratios[7]])  # 9 rounds: the second and the second last
            assert value(results, "first_token_ratio", "median", name, clients) == pytest.approx(factor)
    sentence = results.headline["most_tokens llama.cpp"]["sentence"]
    first = value(results, "rate_ratio", "median", "thin.gguf", 1)
    assert sentence.startswith("Most tokens per second in llama.cpp: at 1 client thin.gguf, 1.1")
    assert "; at 4 clients deep.gguf, 1.13 (1.13 to 1.14) times thin.gguf." in sentence
    assert f"at 1 client {first:.2f}" in results.headline["rate_ratio thin.gguf"]["sentence"]
    for name in ("rate_ratio", "first_token_ratio"):
        assert results.headline[f"{name} thin.gguf"]["value"] == value(results, name, "median", "thin.gguf", 4)
    page = payload_of(Results.load(tmp_path / "out"))
    assert page["story"]["sentences"] == [sentence]
    assert list(page["figures"]) == ["under_load"]
    drawn = {trace["name"]: trace for trace in results.figures()["under_load"].to_plotly_json()["data"]}
    assert set(drawn) == set(NAMES[1:])
    for name, trace in drawn.items():
        expected = [value(results, "rate_ratio", "median", name, clients) for clients in (1, 4)]
        assert ([*trace["x"]], [*trace["y"]]) == ([1, 4], pytest.approx(expected))
    (section,) = [one for one in page["sections"] if one["id"] == "load"]
    (table,) = section["tables"]
    assert [row[:3] for row in table.rows][:2] == [["full.gguf", "1", "8"], ["full.gguf", "4", "8"]]
    assert table.rows[0][3:] == [f"{12 / 16:.1f}", "–", "200", "300", "–"]


@pytest.mark.usefixtures("asked")
def test_the_results_state_the_contexts_that_were_timed(files):
    """The default contexts exceed the 64 positions of the models."""
    defaults = {name: value for name, value in SMALL.items() if name != "contexts"}
    results = bench(files / NAMES[0], [files / NAMES[1]], concurrency=[2], **defaults)
    assert set(results.table["context"].dropna()) == {60}
    assert results.meta["settings"]["contexts"] == [60]


def test_a_difference_within_its_interval_is_no_advice_and_a_busy_machine_no_comparison(
    files, asked, monkeypatch, tmp_path
):
    noise = np.random.default_rng(0)
    monkeypatch.setattr(
        LlamaServer,
        "serve",
        lambda self, prompts, *_: Load(1 + 0.1 * noise.random(), [0.1] * len(prompts)),
    )
    arguments = (files / NAMES[0], [files / name for name in NAMES[1:]])
    again = bench(*arguments, concurrency=[2], **SMALL | {"repeats": 5})
    few = "Not told: 5 rounds are too few to compare exports in llama.cpp (9 are needed)."
    assert again.headline["most_tokens llama.cpp"]["sentence"] == few
    assert "no interval: fewer than 9 rounds" in again.headline["rate_ratio thin.gguf"]["sentence"]
    again = bench(*arguments, concurrency=[2], **SMALL)
    assert "no measurable difference between" in again.headline["most_tokens llama.cpp"]["sentence"]
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.4)
    busy = bench(*arguments, tmp_path / "busy", concurrency=[2], **SMALL)
    assert set(busy.headline) == {"times"}
    assert not set(busy.table.measure) & {"rate_ratio", "first_token_ratio"}
    assert {"output_rate", "first_token_time"} < set(busy.table.measure)
    meta = read_json(tmp_path / "busy" / "results.json")
    assert "concurrency=[2]" in meta["next"]["command"]
    assert payload_of(Results.load(tmp_path / "busy"))["figures"] == {}


def test_llama_cpp_serves_as_many_clients_as_it_has_slots(files, monkeypatch):
    """Every request gets its tokens, one client sends one at a time, and four run together.

    The first requests, one of every client, wait for each other, so that a busy machine changes nothing.
    """
    model = LlamaCpp(files / "thin.gguf")
    running, most = [], []
    stream, lock = LlamaCpp.stream, threading.Lock()
    gates = []

    def counted(self, prompt, count, arrived):
        with lock:
            running.append(prompt)
            most.append(len(running))
            is_first = len(most) <= gates[-1].parties
        if is_first:
            gates[-1].wait(60)
        stream(self, prompt, count, arrived)
        with lock:
            running.remove(prompt)

    monkeypatch.setattr(LlamaCpp, "stream", counted)
    prompts = [[5 + at] * 6 for at in range(6)]
    with in_llama_cpp(model, 4, 12, torch.device("cpu")) as served:
        for clients in (1, 4):
            most.clear()
            gates.append(threading.Barrier(clients))
            load = served.serve(prompts, 5, clients)
            assert max(most) == clients
            assert len(load.first_tokens) == 6
            assert all(0 < seconds <= load.seconds for seconds in load.first_tokens)
        most.clear()
        gates.append(threading.Barrier(1))
        with refused("cannot serve"):
            served.serve([[5] * 400], 5, 1)


def test_the_time_to_the_first_token_is_that_of_the_first_of_several(monkeypatch):
    """A clock that is a second later at each reading: the start, each request, its three tokens, the end."""
    clock = itertools.count()
    monkeypatch.setattr("fulldepth.execution.serving.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model = SimpleNamespace(stream=lambda prompt, count, arrived: [arrived(None) for _ in range(count)])
    assert LlamaServer(model).serve([[5], [6]], 3, 1) == Load(9, [1, 1])


class Engine:
    """An engine with vLLM's interface: a token for every running request in each step."""

    def __init__(self, short=0):
        self.left, self.most, self.prompts, self.steps, self.short = {}, 0, [], 0, short

    def add_request(self, name, prompt, sampling):
        self.left[name] = sampling.max_tokens - self.short
        self.prompts.append(prompt["prompt_token_ids"])
        self.most = max(self.most, len(self.left))

    def step(self):
        self.steps += 1
        for name in [*self.left]:
            self.left[name] -= 1
            done = not self.left[name]
            yield SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])], finished=done)
            if done:
                del self.left[name]


def test_the_loop_of_vllm_keeps_as_many_requests_as_clients(monkeypatch):
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **options: SimpleNamespace(**options))
    )
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    for clients, waves in ((1, 7), (3, 3)):
        engine = Engine()
        clock = SimpleNamespace(perf_counter=lambda engine=engine: engine.steps)
        monkeypatch.setattr("fulldepth.execution.serving.time", clock)
        load = VllmServer(engine).serve([[at] for at in range(7)], 4, clients)
        assert (engine.most, engine.prompts) == (clients, [[at] for at in range(7)])
        assert load == Load(4 * waves, [1] * 7)  # each wave takes a step for each of the four tokens
    with refused("vLLM answered with 3 tokens; 4 were asked for"):
        VllmServer(Engine(short=1)).serve([[5]], 4, 1)


def test_prompts_are_the_beginnings_of_held_out_rows(files, asked):
    rows = [" ".join(["the", "123"] * (4 + at % 3) * 4) for at in range(12)]
    results = bench(
        files / NAMES[0], [files / NAMES[1]], concurrency=[2], heldout=[{"text": text} for text in rows], **SMALL
    )
    assert results.meta["data"]["heldout"]["kind"] == "text"
    tokens, _ = gguf_files.vocabulary(VOCABULARY)
    prompts = asked[0][3]
    assert [len(prompt) for prompt in prompts] == [8] * 4
    spelled = ["".join(tokens[number] for number in prompt).replace("Ġ", " ") for prompt in prompts]
    assert all(any(text in row for row in rows) for text in spelled), spelled
    tokens = load_tokenizer(files / NAMES[0])
    tokens.chat_template = "{% for m in messages %}0 0 0 {{ m['content'] }} {% endfor %}"
    pairs = [{"prompt": "the", "response": " 123" * 12} for _ in range(2)]
    options = {"concurrency": [2], "heldout": pairs, "tokenizer": tokens, "chat": False}
    bench(files / NAMES[0], [files / NAMES[1]], **options, **SMALL)
    assert tokens.decode(asked[-1][3][0]).startswith("the")
    examples = Examples([], [Example.of([*range(n, n + 12)], 1, 12) for n in (3, 30)], {"name": "rows"})
    results = bench(files / NAMES[0], [files / NAMES[1]], concurrency=[2], data=examples, **SMALL)
    assert results.meta["data"] == examples.meta
    assert asked[-1][3] == [[*range(n, n + 8)] for n in (3, 30, 3, 30)]
    with refused("longest held-out row has .* prompts need 40. Set --contexts"):
        bench(
            files / NAMES[0], [files / NAMES[1]], concurrency=[2], heldout=["the 123"] * 9, **SMALL | {"contexts": [40]}
        )


@pytest.mark.usefixtures("unproven")
def test_what_cannot_be_served_is_refused_with_what_can(files, tmp_path, monkeypatch):
    full, thin = files / "full.gguf", files / "thin.gguf"
    model = tiny()
    model.name_or_path = ""
    fast = export(planned.plan(model, [2], values=None), model, "fast", tmp_path / "fast").path
    monkeypatch.setattr("fulldepth.execution.serving.find_spec", lambda _: None)
    cases = [
        ([full, files / "folder"], {}, "served by vLLM, which is not installed: pip install vllm. .*gguf files"),
        ([full, fast], {}, "no class for .*fast. Served can be: .gguf files, by llama.cpp; folders of"),
        ([full, model], {}, "A loaded LlamaForCausalLM cannot be served; name its folder"),
        ([full, files / "wide.gguf"], {}, "vocabulary of 330"),
        ([full, thin], {"contexts": [62]}, "62 tokens and 4 new ones exceed the 64 positions"),
    ]
    for (original, other), options, words in cases:
        with refused(words):
            bench(original, [other], tmp_path / "out", concurrency=[2], **SMALL | options)
        assert not (tmp_path / "out").exists()
    for options, words in (
        ({"concurrency": [2], "batches": [1]}, "--batches has no effect with --concurrency"),
        ({"concurrency": [2], "batch_size": 3, "heldout": ["w1 w2"]}, "--batch-size has no effect with --concurrency"),
        ({"requests": 3}, "--requests has no effect without --concurrency"),
    ):
        with refused(words):
            bench(full, [thin], **options)
