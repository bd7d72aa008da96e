"""Models with a tree or a memory, measured from a checkpoint folder, against the model in plain loops.

Their states and values: `execution.test_depth_llama`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from architectures import combinations
from architectures import oracle as plain
from fulldepth.measurement import measure
from metrics.oracle import cosines, plain_coherence

T, N, LAYERS = 12, 6, 5
EXACT = {"rtol": 1e-9, "atol": 1e-10}
PRUNED = "static-pruned"
"""A model that lost most weights of its routers by top-p pruning: their logits are -inf."""
MEMORY = [PRUNED, "dynamic", "kv-public", "tree-kv"]


@pytest.fixture(scope="module")
def ids(windows):
    return windows(N, T)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tokenizer, text_file, ids):
    """name -> results, the model, the trace of the same windows, the folder of the checkpoint."""
    made = {}

    def get(name):
        if name not in made:
            model = combinations.build("static" if name == PRUNED else name, vocab_size=len(tokenizer))
            if name == PRUNED:
                assert model.prune_routers(p=0.6)["share"] > 0.2
            folder = tmp_path_factory.mktemp("depth_llama") / name
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            asked = ["coherence"]
            asked += ["retrieval_weight", "expected_retrieval"] if model.config.memory != "none" else []
            sizes = {"max_sequences": N, "sequence_length": T, "batch_size": 4}
            results = measure(folder, text_file, measures=asked, seed=3, order="first", **sizes)
            trace = plain.run(model.state_dict(), model.config, ids, frequencies=combinations.frequencies(model))
            made[name] = results, model, trace, folder
        return made[name]

    return get


def distributions(weights):
    """Tokens' absolute shares and masses [tokens][H][r] of one layer's weights."""
    weights = weights.double().numpy()
    if weights.ndim == 3:  # over key and value heads
        size, mass = np.abs(weights).sum(-1)[None], weights.sum(-1)[None]
    else:
        mass = weights.reshape(-1, *weights.shape[-2:])
        size = np.abs(mass)
    return size / size.sum(-1, keepdims=True), mass


@pytest.mark.parametrize("name", MEMORY)
def test_retrieval(measured, name):
    results, model, trace, _ = measured(name)
    table = results.table.query("measure == 'retrieval_weight'")
    expected, depth = {}, {}
    for index in range(1, LAYERS):
        layer = index + 1
        shares, masses = (found.mean(0) for found in distributions(trace.routing[index]))
        for statistic, heads in (("share", shares), ("mean", masses)):
            expected |= {("routing", layer, m, statistic): heads[:, m].mean() for m in range(layer)}
            read = range(layer) if statistic == "share" else [index]
            expected |= {(f"head_{h}", layer, m, statistic): heads[h, m] for h in range(len(heads)) for m in read}
        w_o = model.model.layers[index].self_attn.o_proj.weight.detach().numpy()
        norms = [np.linalg.norm(w_o[:, 6 * h : 6 * h + 6]) for h in range(4)]
        group = 4 // len(shares)
        depth[layer] = sum(p * (shares[h // group] @ np.arange(layer)) for h, p in enumerate(norms)) / sum(norms)
    keyed = table.set_index(["site", "layer", "other", "statistic"]).value.to_dict()
    assert keyed == pytest.approx(expected, rel=1e-9, abs=1e-10)
    assert (table.value == 0).any() == (name == PRUNED), "what was pruned is never read"
    found = results.values("expected_retrieval", "value", "routing")
    assert found.to_dict() == pytest.approx(depth, rel=1e-9)
    assert set(table["count"]) == {N * T}


@pytest.mark.parametrize("name", ["tree-skipping", "serial"])
def test_coherence_of_attention_is_that_of_what_it_read(measured, name, ids):
    results, model, trace, _ = measured(name)
    after, tree = {}, model.config.tree or {}
    for index, layer in enumerate(model.model.layers):
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args, at=index: after.update({at: args[0]}))
    with torch.no_grad():
        model(ids)
    for index, layer in enumerate(model.model.layers):
        x = trace.states[index]
        if index in tree:
            ends = [trace.states[source + 1] for source in tree[index]]
            norms = [norm.weight.detach() for norm in layer.tree_norms]
            x = sum(plain.rms_norm(h, gain, model.config.rms_norm_eps) for h, gain in zip(ends, norms, strict=True))
        expected = plain_coherence(x.numpy(), after[index].numpy()).mean()
        assert results.values("coherence", "mean", "attention")[index + 1] == pytest.approx(expected, abs=1e-9)


def test_nearest_tokens_of_dynamic_routers(measured, tokenizer):
    results, model, _, _ = measured("dynamic")
    listed = results.meta["router_tokens"]
    heads, embeddings = 2, model.model.embed_tokens.weight.detach().numpy()
    seen, strength = set(), []
    for entry in listed["routers"]:
        layer, source, head = entry["layer"], entry["source"], entry["head"]
        seen.add((layer, source, head))
        (weight,) = model.model.layers[layer - 1].self_attn.router.state_dict().values()
        near = cosines(embeddings, weight.view(heads, layer, 24)[head, source].numpy()[None])
        best = np.argsort(-near)[:30]
        assert [token for token, _ in entry["tokens"]] == [tokenizer.decode([i]) for i in best]
        assert_allclose([cosine for _, cosine in entry["tokens"]], near[best], atol=6e-5)
        strength.append(near[best].mean())
    assert len(seen) == listed["of"] == heads * (2 + 3 + 4 + 5)
    assert strength == sorted(strength, reverse=True)


def test_padding_and_batches_change_no_weight(measured, ragged_tsv):
    options = {"measures": ["retrieval_weight"], "sequence_length": 32}
    one, five = (measure(measured("dynamic")[3], ragged_tsv, batch_size=size, **options).table for size in (1, 5))
    assert_allclose(one.value, five.value, **EXACT)
    assert one["count"].tolist() == five["count"].tolist()
