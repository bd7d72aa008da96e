"""Searches against the plain loop, one stock pass after another; what a plan of `search` says, and what is refused."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import peft
import pytest
import torch
import torch.nn.functional as F

import tiny_models
import tiny_models as tm
from families import zoo
from fulldepth.architectures import SKIPPED
from fulldepth.core.progress import Watcher
from fulldepth.data.examples import Examples
from fulldepth.execution import find_anatomy
from fulldepth.results import Results
from fulldepth.skip.exports.export import export
from fulldepth.skip.exports.fold import scaled_logits
from fulldepth.skip.exports.formats import export_obstacle
from fulldepth.skip.search import search
from refusals import refused
from skip import plain, planned


@pytest.fixture(scope="module")
def model():
    return plain.trained(5, 32, 200)


def find(model, data, blocks=None, **options):
    return search(model, data, blocks, **{"fit": False, "batch_size": 4, **options})


@pytest.mark.parametrize(
    ("criterion", "seed", "granularity"), [("loss", 0, "attention"), ("kl", 1, "mlp"), ("loss", 2, "layer")]
)
def test_exact_and_greedy_pick_what_the_plain_loop_picks_down_to_the_last_block(model, criterion, seed, granularity):
    examples = plain.examples(heldout=20, seed=seed)
    measure = plain.loss if criterion == "loss" else plain.divergence
    picks, measures = plain.plain_loop(model, examples.heldout, 5, granularity, measure)
    for name in ("exact", "greedy"):
        plan = find(model, examples, 5, search=name, criterion=criterion, granularity=granularity)
        assert plan.blocks == picks, name
        measured = plan.losses if criterion == "loss" else plan.cost["divergences"]
        assert measured == pytest.approx(measures, rel=1e-5, abs=1e-6)
        losses = [plain.loss(model, examples.heldout, picks[:n], granularity) for n in range(6)]
        assert plan.losses == pytest.approx(losses, rel=1e-5)
        assert [found["pick"] for found in plan.cost["rounds"]] == picks


def test_layers_of_experts_are_candidates():
    """Experts are no linear layers; those of layer 1 add next to nothing."""
    model = zoo.build("mixtral", "causal-lm")
    model.model.layers[0].mlp.experts.down_proj.data.mul_(1e-3)
    plan = find(model, plain.examples(heldout=8), 3, search="exact", granularity="mlp")
    assert plan.blocks[0] == 1
    assert plan.losses[3] == pytest.approx(
        plain.loss(model, plain.examples(heldout=8).heldout, plan.blocks, "mlp"), rel=1e-5
    )


@pytest.mark.parametrize(
    ("name", "granularity", "passes"),
    [
        ("depth_llama-tree", "layer", 60),
        ("depth_llama-static", "attention", 60),
        ("depth_llama-dynamic", "mlp", 60),
        ("depth_llama-kv", "attention", 60),
        ("depth_llama-hyper", "layer", None),
    ],
)
def test_trees_and_memories_are_searched_as_the_plain_loop_does(name, granularity, passes):
    model, examples, told = tm.build(name, dtype=torch.float64), plain.examples(heldout=6), []
    picks, losses = plain.plain_loop(model, examples.heldout, 3, granularity)
    for search_name in ("exact", "greedy"):
        watcher = Watcher(say=told.append)
        plan = find(model, examples, 3, search=search_name, granularity=granularity, batch_size=1, watcher=watcher)
        assert plan.blocks == picks
        assert plan.losses == pytest.approx(losses, rel=1e-9)
        assert plan.cost["forwards"] <= (passes or 60)
    pairs = itertools.combinations((1, 2, 3), 2)
    best = min(pairs, key=lambda pair: plain.loss(model, examples.heldout, pair, granularity))
    assert {*picks[:2]} == {*best}
    assert "folded only" in told[0]
    assert any("takes a forward pass of its own" in line for line in told) is (passes is not None)
    assert passes is None or f"at most {passes} passes over batches of up to 1 " in told[1]


def test_the_input_of_a_layer_of_a_tree_is_the_sum_that_it_reads():
    """The third layer changes its sum more than the second, and less the output before it."""
    model, examples = tm.build("depth_llama-tree", dtype=torch.float64), plain.examples(heldout=6)
    model.model.layers[2].mlp.down_proj.weight.data.mul_(3)
    found = find(model, examples, 3, search="cosine", granularity="layer")
    scores, inputs = [0.0] * 3, {}
    for number, block in enumerate(model.model.layers):

        def compare(module, args, output, number=number):
            scores[number] += float((1 - F.cosine_similarity(inputs[number], output, dim=-1)).sum())

        block.input_layernorm.register_forward_pre_hook(
            lambda module, args, number=number: inputs.__setitem__(number, args[0])
        )
        block.register_forward_hook(compare)
    with torch.no_grad():
        for example in examples.heldout:
            model(input_ids=example.input_ids[None])
    assert found.blocks == sorted((1, 2, 3), key=lambda layer: scores[layer - 1]) == [2, 3, 1]


def test_exact_is_exact_where_nothing_separates_the_candidates():
    torch.manual_seed(0)
    model, examples = plain.fresh(6, 16).double().eval(), plain.examples(heldout=24)  # untrained: guesses are wrong
    picks, losses = plain.plain_loop(model, examples.heldout, 6, "attention")
    plan = find(model, examples, 6, search="exact", batch_size=2)
    assert (plan.blocks, plan.cost["chunks"]) == (picks, 12)
    assert plan.losses == pytest.approx(losses, rel=1e-6)


def test_of_equals_the_first_goes_first(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (2, 4, 5):
            model.model.layers[layer - 1].self_attn.o_proj.weight.zero_()
    examples = plain.examples(heldout=40)
    for name in ("exact", "greedy"):
        plan = find(model, examples, 3, search=name)
        assert plan.blocks == [2, 4, 5]
        assert len(set(plan.losses)) == 1
    assert 1 in find(model, examples, 1).cost["unsure_rounds"]


@pytest.mark.slow
def test_greedy_is_right_where_it_is_sure_and_reads_until_the_data_decide(model):
    examples = plain.examples(heldout=96, seed=3)
    picks, _ = plain.plain_loop(model, examples.heldout, 3, "attention")
    plan = find(model, examples, 3)
    assert plan.blocks == picks  # a quarter of the plain loop's FLOPs gives 2, 3, 4
    assert {found["decided_by"] for found in plan.cost["rounds"]} <= {"bounds", "data"}

    distinct, examples = copy.deepcopy(model), plain.examples(heldout=128)
    with torch.no_grad():  # blocks that clearly differ in worth
        for layer, change in ((4, 0.02), (3, 0.3), (2, 5.0)):
            distinct.model.layers[layer - 1].self_attn.o_proj.weight *= change
    exact, greedy = (find(distinct, examples, 3, search=name) for name in ("exact", "greedy"))
    sure = min([4, *greedy.cost["unsure_rounds"]]) - 1
    assert sure
    assert greedy.blocks[:sure] == exact.blocks[:sure]
    assert greedy.cost["flops"] < exact.cost["flops"] < 0.75 * exact.cost["plain_flops"]  # five layers share little


def test_under_scaled_a_candidate_is_ranked_by_its_own_fit(model):
    examples = plain.examples(train=12, heldout=8)
    plan = find(model, examples, 2, criterion="scaled", search="exact")
    picks = []
    for _ in range(2):
        healed = {}
        for layer in range(1, 6):
            if layer not in picks:
                given = [*picks, layer]
                healed[layer] = search(
                    model, examples, search="given", given=given, epochs=1, learning_rate=1e-2, batch_size=4, patience=9
                ).cost["fit"]["healed"]["losses"][-1]
        picks.append(min(healed, key=healed.__getitem__))
    assert plan.blocks == picks


def slopes(model, example):
    """Layer -> dL/dg of a gate on what its attention gives."""
    gates = [torch.ones((), requires_grad=True) for _ in model.model.layers]
    hooks = [
        block.self_attn.o_proj.register_forward_hook(lambda module, args, output, gate=gate: output * gate)
        for block, gate in zip(model.model.layers, gates, strict=True)
    ]
    logits = model(input_ids=example.input_ids[None]).logits[0, :-1]
    loss = F.cross_entropy(logits, example.labels[1:], ignore_index=-100, reduction="sum")
    for hook in hooks:
        hook.remove()
    return [float(slope) for slope in torch.autograd.grad(loss, gates)]


def test_rankings_are_those_of_their_formulas(model):
    examples = plain.examples(heldout=12)
    losses = [plain.loss(model, examples.heldout, [layer], "attention") for layer in range(1, 6)]
    gradients = zip(*(slopes(model, example) for example in examples.heldout), strict=True)
    for name, scores in {"one-shot": losses, "taylor": [abs(sum(column)) for column in gradients]}.items():
        expected = sorted(range(1, 6), key=lambda layer, scores=scores: scores[layer - 1])
        assert find(model, examples, 5, search=name).blocks == expected, name


def test_a_ranking_by_gradients_saves_their_mean_over_the_predicted_tokens(model, tmp_path):
    examples = plain.examples(heldout=9)
    find(model, examples, 2, search="taylor", output=tmp_path)
    gradients = zip(*(slopes(model, example) for example in examples.heldout), strict=True)
    tokens = sum(int((example.labels[1:] != -100).sum()) for example in examples.heldout)
    rows = Results.load(tmp_path).table
    assert (rows.measure.tolist(), rows.layer.tolist()) == (["sensitivity"] * 5, [1, 2, 3, 4, 5])
    assert rows.value.tolist() == pytest.approx([abs(sum(column)) / tokens for column in gradients], rel=1e-4)


def test_rankings_without_a_score(model):
    examples = plain.examples(heldout=6)
    assert find(model, examples, 3, search="last").blocks == [5, 4, 3]
    assert find(model, examples, search="given", given=[2, 5]).blocks == [2, 5]
    drawn = [find(model, examples, 5, search="random", seed=seed).blocks for seed in (0, 0, 1, 2)]
    assert all(sorted(blocks) == [1, 2, 3, 4, 5] for blocks in drawn)
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn))) > 1


def test_the_model_is_whole_after_a_search_that_breaks_off(model):
    before, model = plain.trained_weights(5, 32, 200), copy.deepcopy(model).train()
    for at in (0, 3):
        told = itertools.count()
        watcher = Watcher(begin=lambda title, total, told=told, at=at: 1 // (next(told) != at))
        with pytest.raises(ZeroDivisionError):
            search(model, plain.examples(), 2, batch_size=4, epochs=1, watcher=watcher)
        assert model.training
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        assert not any("forward" in vars(module) for module in model.modules())
        assert tm.same_weights(model, before)


@pytest.mark.parametrize("kind", ["mbart", "pegasus", "llama4_text"])
def test_decoders_with_a_wrapper_and_flat_branches_are_searched_and_healed(kind):
    """The body of mBART's decoder names no embeddings; the experts of Llama 4 give [B T, D]."""
    model, examples = zoo.build(kind, "causal-lm"), plain.examples(8, 8)
    found = search(model, examples, given=[2], fit=False)
    for layers, loss in (((), found.losses[0]), ([2], found.losses[1])):
        assert loss == pytest.approx(plain.loss(model, examples.heldout, layers, "attention"), rel=1e-5)
    plan, ids = planned.plan(model), tm.token_ids(2, 9)
    with torch.no_grad():
        expected = planned.scaled(model, plan).float()(input_ids=ids).logits
    got = scaled_logits(find_anatomy(model), plan, ids)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_a_model_whose_scalars_cannot_be_fitted_is_refused_before_the_search():
    kind = SKIPPED["llama"]
    model = kind(kind.config_class(**tm.DECODER, skipped_attention=[2])).eval()
    begun = []
    with refused("only layers 1, 3 have one"):
        search(model, plain.examples(4, 4), 1, watcher=Watcher(begin=lambda *title: begun.append(title)))
    assert not begun
    assert search(model, plain.examples(4, 4), 1, fit=False).blocks in ([1], [3])


REFUSED = [
    ("6 blocks", {"blocks": 6}),
    ("How much to remove", {"blocks": None}),
    ("criterion", {"criterion": "nll"}),
    ("given", {"blocks": 2, "given": [1, 2], "search": "greedy"}),
    ("blocks is 1", {"search": "given", "given": [1, 2]}),
    ("layer 3 more than once", {"blocks": None, "search": "given", "given": [3, 3]}),
    ("^There is no attention of layer 6 to remove", {"blocks": None, "search": "given", "given": [6]}),
    (
        "^There is no layer 6 to remove",
        {"blocks": None, "search": "given", "given": [6], "granularity": "layer", "fit": False},
    ),
    (
        "--given removes from layer 2, of which --keep lets nothing be removed",
        {"blocks": None, "search": "given", "given": [1, 2], "keep": [2]},
    ),
    ("budget", {"budget": "soon"}),
    ("--budget has no effect with --search exact; it applies to greedy.$", {"budget": "10m", "search": "exact"}),
    ("pool has no effect with --criterion scaled; it applies to loss and kl", {"pool": 2, "criterion": "scaled"}),
    ("--max-loss .* cosine; it applies to greedy and exact", {"blocks": None, "max_loss": 0.1, "search": "cosine"}),
    ("^--set confidence has no effect with --search last; it applies", {"confidence": 0.9, "search": "last"}),
    ("--criterion .* to greedy, exact and one-shot", {"criterion": "kl", "search": "cosine"}),
    ("--decode-share has no effect without --target-speedup or --max-loss.$", {"decode_share": 0.5}),
    ("--set context .* --target-cache", {"context": 9}),
    ("--set patience has no effect with --no-fit.$", {"patience": 3}),
    ("--temperature has no effect without --generate-responses.$", {"temperature": 0.5}),
    ("fit_batch_size .* with --no-fit and --criterion loss; it applies to scaled", {"fit_batch_size": 3}),
    ("'chunks'", {"chunk": 4}),
    ("device", {"device": "cpu", "device_map": "auto"}),
    ("BertForMaskedLM", {"model": tm.build("bert")}),
    ("a tree .* not with scalars: .* --no-fit", {"model": tm.build("depth_llama-tree"), "fit": True}),
    ("a memory .* not with target_bytes", {"model": tm.build("depth_llama-kv"), "blocks": None, "target_bytes": 0.9}),
    ("streams .* not with the search taylor", {"model": tm.build("depth_llama-hyper"), "search": "taylor"}),
    ("a tree .* not with the criterion scaled", {"model": tm.build("depth_llama-dynamic"), "criterion": "scaled"}),
    ("merge_and_unload", {"model": "adapted"}),
    ("NaN", {"model": "broken"}),
    ("data are empty", {"heldout": []}),
    ("no token counts", {"heldout": [plain.BLANK]}),
    ("no examples to fit", {"train": [], "fit": True}),
]


@pytest.mark.parametrize(("words", "changes"), REFUSED)
def test_what_cannot_be_searched_is_refused(model, words, changes):
    examples = plain.examples(heldout=4)
    given = {"model": model, "train": examples.train, "heldout": examples.heldout, "blocks": 1, **changes}
    if given["model"] == "adapted":
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        given["model"] = peft.get_peft_model(plain.fresh(3, 32), config)
    if given["model"] == "broken":
        given["model"] = copy.deepcopy(model)
        given["model"].model.layers[2].mlp.down_proj.weight.data[0, 0] = torch.nan
    data = Examples(given.pop("train"), given.pop("heldout"), examples.meta)
    with refused(words):
        find(given.pop("model"), data, **given)


def test_a_search_of_layers_says_first_what_no_export_will_hold(unproven, tmp_path):
    """The scale of DiffLlama's attention follows from the number of the layer."""
    told = []
    watcher = Watcher(say=told.append, begin=lambda title, total: told.append(title))
    model = zoo.build("diffllama", "causal-lm")
    plan = find(model, plain.examples(4, 4), 1, granularity="layer", search="given", given=[2], watcher=watcher)
    assert "exported as folded only" in told[0]
    with refused("other logits than within the model. Use --format folded"):
        export(plan, model, "layer", tmp_path / "layer")
    assert export(plan, model, "folded", tmp_path / "folded").path.is_dir()
    assert "No plan of this model can be exported" in export_obstacle(tiny_models.build("depth_llama-static"), "mlp")


def test_a_search_says_first_that_scalars_could_not_be_exported(tmp_path):
    """EXAONE-4 norms what its branches add, so that no factor of the stream reaches their weights."""
    told = []
    model = zoo.build("exaone4", "causal-lm")
    options = {"search": "given", "given": [2], "watcher": Watcher(say=told.append), "epochs": 1}
    plan = find(model, plain.examples(4, 4), 1, fit=True, **options)
    assert told[0].startswith("A plan with scalars cannot be exported: the output of its attention depends")
    with refused("cannot be folded"):
        export(plan, model, "folded", tmp_path / "folded")
    told.clear()
    plan = find(model, plain.examples(4, 4), 1, fit=False, search="given", given=[2], watcher=Watcher(say=told.append))
    assert not any("scalars" in line for line in told)
    assert export(plan, model, "folded", tmp_path / "folded").path.is_dir()


def test_a_ranking_reads_the_data_once_and_computes_losses_when_asked(model, tmp_path):
    """Its scores against plain hooks; a pass over the data with hooks, and no other."""
    examples = plain.examples(heldout=8)
    scores, tokens, seen = [0.0] * 5, 0, {}

    def compare(module, args, output, number):
        inner = seen[number].double()
        branch = (output[0] if isinstance(output, tuple) else output).double()
        scores[number] += float((1 - F.cosine_similarity(inner, inner + branch, dim=-1)).sum())

    hooks = []
    for number, block in enumerate(model.model.layers):
        hooks.append(
            block.register_forward_pre_hook(
                lambda module, args, kwargs, number=number: seen.__setitem__(
                    number, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
        )
        hooks.append(block.self_attn.register_forward_hook(partial(compare, number=number)))
    with torch.no_grad():
        for example in examples.heldout:
            model(input_ids=example.input_ids[None])
            tokens += len(example.input_ids)
    for hook in hooks:
        hook.remove()
    bare = find(model, examples, 2, search="cosine", output=tmp_path / "bare")
    batches = -(-len(examples.heldout) // 4)
    assert (bare.losses, bare.cost["forwards"]) == ([], batches)
    expected = {f"attention {number + 1}": score / tokens for number, score in enumerate(scores)}
    assert bare.cost["scores"] == pytest.approx(expected, rel=1e-5)
    results = Results.load(tmp_path / "bare")
    rows = results.table.query("measure == 'influence'").set_index("layer").value
    assert rows.to_dict() == pytest.approx({n + 1: score / tokens for n, score in enumerate(scores)}, rel=1e-5)
    assert "Losses were not computed" in results.headline["loss_added"]["sentence"]
    assert "Losses were not computed" in (tmp_path / "bare" / "report.html").read_text()
    asked = find(model, examples, 2, search="cosine", losses=True)
    picks = asked.blocks
    assert picks == bare.blocks
    losses = [plain.loss(model, examples.heldout, picks[:n], "attention") for n in range(3)]
    assert asked.losses == pytest.approx(losses, rel=1e-5)
    for options, words in (
        ({"losses": False, "search": "greedy"}, "losses has no effect with --search greedy"),
        ({"losses": False, "fit": True, "search": "cosine"}, "--no-losses and --fit contradict"),
    ):
        with refused(words):
            search(model, examples, 2, **options)
