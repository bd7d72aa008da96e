"""Searches against the plain loop, one stock pass after another; what a plan of `search` says, and what is refused."""

from __future__ import annotations

import itertools
import json

import peft
import pytest
import torch

import tiny_models as tm
from families import zoo
from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.skip import export
from fulldepth.skip.assessment.bench import bench
from fulldepth.skip.assessment.curve import curve
from fulldepth.skip.assessment.outcome import loss_added
from fulldepth.skip.selection.search import estimate, search
from fulldepth.skip.summary import lines
from skip import plain

MEASURES = {"loss": plain.loss, "kl": plain.divergence}


@pytest.fixture(scope="module")
def model():
    return plain.trained(5, 32, 200)


def find(model, data, blocks=None, **options):
    return search(model, data, blocks, **{"fit": False, "batch_size": 4, **options})


def timeless(plan):
    """A plan without how long it took."""
    document = json.loads(json.dumps(plan.document()))
    document["cost"].pop("seconds")
    document["cost"].get("fit", {}).pop("seconds", None)
    return document


@pytest.mark.parametrize("criterion", MEASURES)
@pytest.mark.parametrize(("seed", "granularity"), [(0, "attention"), (1, "mlp"), (2, "layer"), (3, "attention")])
def test_exact_and_greedy_pick_what_the_plain_loop_picks_down_to_the_last_block(model, criterion, seed, granularity):
    examples = plain.examples(heldout=20, seed=seed)
    picks, measures = plain.plain_loop(model, examples.heldout, 5, granularity, MEASURES[criterion])
    for name in ("exact", "greedy"):
        plan = find(model, examples, 5, search=name, criterion=criterion, granularity=granularity)
        assert plan.blocks == picks, name
        measured = plan.losses if criterion == "loss" else plan.cost["divergences"]
        assert measured == pytest.approx(measures, rel=1e-5, abs=1e-6)
        losses = [plain.loss(model, examples.heldout, picks[:n], granularity) for n in range(6)]
        assert plan.losses == pytest.approx(losses, rel=1e-5)
        assert [found["pick"] for found in plan.cost["rounds"]] == picks


@pytest.mark.parametrize(("name", "fields"), [("qwen3_moe", {"mlp_only_layers": [1, 2]}), ("mixtral", {})])
def test_layers_of_experts_are_candidates(name, fields):
    """Experts are no linear layers; the plain loop prefers layer 1, whose experts add next to nothing."""
    model, examples = zoo.build(name, "causal-lm", **fields), plain.examples(heldout=8)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(1e-3)
    picks, losses = plain.plain_loop(model, examples.heldout, 3, "mlp")
    assert picks[0] == 1
    plan = find(model, examples, 3, search="exact", granularity="mlp")
    assert plan.blocks == picks
    assert plan.losses == pytest.approx(losses, rel=1e-5)


def test_a_model_with_an_adapter_is_merged_first(tmp_path):
    adapted = peft.get_peft_model(plain.fresh(3, 32), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for command in (search, curve):
        with pytest.raises(FulldepthError, match=r"PeftModelForCausalLM is neither .*model\.merge_and_unload\(\)"):
            command(adapted, plain.examples(heldout=8))
    with pytest.raises(FulldepthError, match="PeftModelForCausalLM is neither"):
        bench(adapted, [adapted])
    inner = adapted.base_model.model
    plan = find(inner, plain.examples(heldout=8), 1)
    with pytest.raises(FulldepthError, match="holds an adapter, which has no place in an export"):
        export(plan, inner, "fast", tmp_path / "fast")
    assert find(adapted.merge_and_unload(), plain.examples(heldout=8), 1).blocks == plan.blocks


@pytest.mark.parametrize("seed", range(3))
def test_exact_is_exact_where_nothing_separates_the_candidates(seed):
    torch.manual_seed(seed)
    model = plain.fresh(6, 16).double().eval()  # untrained: every guess is a guess
    examples = plain.examples(heldout=24, seed=seed)
    picks, losses = plain.plain_loop(model, examples.heldout, 6, "attention")
    plan = find(model, examples, 6, search="exact", batch_size=2)
    assert (plan.blocks, plan.cost["chunks"]) == (picks, 12)
    assert plan.losses == pytest.approx(losses, rel=1e-6)


def test_of_equals_the_first_goes_first():
    model = plain.trained(5, 32, 200)
    with torch.no_grad():
        for layer in (2, 4, 5):
            model.model.layers[layer - 1].self_attn.o_proj.weight.zero_()
    examples = plain.examples(heldout=40)
    for name in ("exact", "greedy"):
        plan = find(model, examples, 3, search=name)
        assert plan.blocks == [2, 4, 5]
        assert len(set(plan.losses)) == 1
    assert 1 in find(model, examples, 1).cost["unsure_rounds"]


def sure_rounds(plan):
    """Rounds up to the first of which greedy says that other data might decide otherwise."""
    return min([len(plan.blocks) + 1, *plan.cost["unsure_rounds"]]) - 1


def test_greedy_is_right_wherever_it_is_sure():
    model, sure = plain.trained(5, 32, 200), 0
    with torch.no_grad():  # blocks that clearly differ in worth
        for layer, change in ((4, 0.02), (3, 0.3), (2, 5.0)):
            model.model.layers[layer - 1].self_attn.o_proj.weight *= change
    for seed in range(3):
        examples = plain.examples(heldout=128, seed=seed)
        exact, greedy = (find(model, examples, 3, search=name) for name in ("exact", "greedy"))
        sure += sure_rounds(greedy)
        assert greedy.blocks[: sure_rounds(greedy)] == exact.blocks[: sure_rounds(greedy)]
        assert greedy.cost["flops"] < exact.cost["flops"] < 0.75 * exact.cost["plain_flops"]  # five layers share little
    assert sure >= 4


@pytest.mark.slow
def test_searches_keep_their_goals_on_twelve_trained_layers():
    model = plain.trained(12, 32, 250)
    examples = plain.examples(heldout=512)
    for blocks in (2, 4):
        exact, greedy = (find(model, examples, blocks, search=name) for name in ("exact", "greedy"))
        # Prefixes shared alone leave (L + 3) / 2 of L + 1 passes: 0.58 at 12 layers; the goal of 0.55 needs luck.
        assert exact.cost["flops"] <= 0.58 * exact.cost["plain_flops"]
        assert greedy.cost["flops"] <= 0.45 * greedy.cost["plain_flops"]
        assert greedy.blocks[: sure_rounds(greedy)] == exact.blocks[: sure_rounds(greedy)]
        picks, _ = plain.plain_loop(model, examples.heldout[:48], 1, "attention")
        few = Examples([], examples.heldout[:48], examples.meta)
        assert find(model, few, 1, search="exact").blocks == picks


@pytest.mark.parametrize("seed", [3, 5])
def test_no_round_ends_before_the_data_decide_unless_a_budget_was_given(model, seed):
    examples, said = plain.examples(heldout=96, seed=seed), []
    picks, _ = plain.plain_loop(model, examples.heldout, 3, "attention")
    free = find(model, examples, 3)
    assert free.blocks == picks  # a quarter of the plain loop's FLOPs gives 2, 3, 4 for both seeds
    assert {found["decided_by"] for found in free.cost["rounds"]} <= {"bounds", "data"}
    assert free.cost["stopped_by_budget"] == []
    capped = find(model, examples, 3, budget=0.42 * free.cost["plain_flops"], watcher=Watcher(say=said.append))
    stopped = [number for number, found in enumerate(capped.cost["rounds"], 1) if found["decided_by"] == "budget"]
    assert stopped
    assert set(stopped) <= set(capped.cost["unsure_rounds"])
    for number, words in zip(stopped, capped.cost["stopped_by_budget"], strict=True):
        scored = capped.cost["rounds"][number - 1]["scored"]
        assert scored in range(3, 96, 3)  # whole chunks, 32 of them
        assert words == f"round {number}: stopped by budget after {scored} of 96 sequences"
        assert any(words.split(": ")[1] in line for line in said)
        assert ("budget", *words.split(": ")) in lines(capped)
        assert words in loss_added(capped, 5).sentence


def test_a_budget_is_kept(model):
    examples = plain.examples(heldout=96)
    free = find(model, examples, 2, budget=1e15)
    for share in (0.99, 0.96):
        assert find(model, examples, 2, budget=share * free.cost["flops"]).cost["flops"] <= share * free.cost["flops"]
    with pytest.raises(FulldepthError, match=r"needs up to .* the budget is"):
        find(model, examples, 2, budget=0.5 * free.cost["flops"])
    with pytest.raises(FulldepthError, match="or --search greedy"):
        find(model, examples, 2, search="exact", budget=free.cost["flops"])


@pytest.mark.parametrize("name", ["greedy", "exact", "one-shot", "cosine", "taylor", "random", "last", "given"])
@pytest.mark.parametrize("criterion", ["loss", "kl", "scaled"])
def test_estimates_are_never_below_the_cost(model, name, criterion):
    options = {"search": name, "criterion": criterion, "batch_size": 4, "epochs": 1}
    options |= {"given": [4, 2]} if name == "given" else {"blocks": 2}
    for heldout in (10, 40):
        examples = plain.examples(train=8, heldout=heldout, seed=heldout)
        bound, cost = estimate(model, examples, **options), search(model, examples, **options).cost
        assert cost["flops"] <= bound.flops
        assert cost["forwards"] <= bound.forwards
        assert cost["fit"]["flops"] <= 1.02 * bound.fit_flops  # batches are drawn anew in every epoch
        assert cost["plain_flops"] <= bound.plain_flops * (1 + 1e-9)


def test_under_scaled_a_candidate_is_ranked_by_its_own_fit(model):
    examples = plain.examples(train=12, heldout=8)
    plan = find(model, examples, 2, criterion="scaled", search="exact")
    picks: list[int] = []
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
    losses = [plain.loss(model, examples.heldout, picks[:n], "attention") for n in range(3)]
    assert plan.losses == pytest.approx(losses, rel=1e-5)


def influences(model, example):
    """Layer -> 1 - cos(x, x + A) summed over tokens."""
    branches = []
    hooks = [
        block.self_attn.register_forward_hook(lambda module, args, output: branches.append(output[0][0]))
        for block in model.model.layers
    ]
    with torch.no_grad():
        states = model(input_ids=example.input_ids[None], output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    found = []
    for (x,), branch in zip(states[:-1], branches, strict=True):
        cosine = (x * (x + branch)).sum(-1) / (x.norm(dim=-1) * (x + branch).norm(dim=-1))
        found.append(float((1 - cosine).sum()))
    return found


def slopes(model, example):
    """Layer -> dL/dg of a gate on what its attention gives."""
    gates = [torch.ones((), requires_grad=True) for _ in model.model.layers]
    hooks = [
        block.self_attn.o_proj.register_forward_hook(lambda module, args, output, gate=gate: output * gate)
        for block, gate in zip(model.model.layers, gates, strict=True)
    ]
    logits = model(input_ids=example.input_ids[None]).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, example.labels[1:], ignore_index=-100, reduction="sum")
    for hook in hooks:
        hook.remove()
    return [float(slope) for slope in torch.autograd.grad(loss, gates)]


def oracle_of(name, model, examples):
    """Layer -> score, lowest first, by definition: one sequence at a time, in the model as it stands."""
    if name == "one-shot":
        return {layer: plain.loss(model, examples, [layer], "attention") for layer in range(1, 6)}
    found = [{"cosine": influences, "taylor": slopes}[name](model, example) for example in examples]
    return {layer: abs(sum(column)) for layer, column in enumerate(zip(*found, strict=True), start=1)}


@pytest.mark.parametrize("name", ["one-shot", "cosine", "taylor"])
@pytest.mark.parametrize("seed", [0, 1])
def test_rankings_are_those_of_their_formulas(model, name, seed):
    examples = plain.examples(heldout=12, seed=seed)
    scores = oracle_of(name, model, examples.heldout)
    plan = find(model, examples, 5, search=name)
    assert plan.blocks == sorted(scores, key=scores.__getitem__)
    losses = [plain.loss(model, examples.heldout, plan.blocks[:n], "attention") for n in range(6)]
    assert plan.losses == pytest.approx(losses, rel=1e-5)


def test_rankings_without_a_score(model):
    examples = plain.examples(heldout=6)
    assert find(model, examples, 3, search="last").blocks == [5, 4, 3]
    assert find(model, examples, search="given", given=[2, 5]).blocks == [2, 5]
    drawn = [find(model, examples, 5, search="random", seed=seed).blocks for seed in range(4)]
    assert all(sorted(blocks) == [1, 2, 3, 4, 5] for blocks in drawn)
    assert drawn[0] == find(model, examples, 5, search="random", seed=0).blocks
    assert len(set(map(tuple, drawn))) > 1


def test_what_is_the_same_comes_out_the_same_and_is_told_beforehand(model):
    examples, heard = plain.examples(heldout=40), []
    begun = []
    watcher = Watcher(say=heard.append, begin=lambda title, total: begun.append(title))
    one, two = (find(model, examples, 2, watcher=watcher, fit=True, epochs=1) for _ in range(2))
    fits = ["Scalars: healing", "Scalars: control"]
    assert [title for title in begun if title.startswith("Scalars")] == fits * 2
    labelled = {name.partition(":")[0]: value for name, value, _ in lines(one)}
    assert labelled["healing"] == f"{one.healed_loss:.4f} nats"
    assert labelled["control"] == f"{one.control_loss.scalars_only:.4f} nats"
    kept = {**one.cost, "fit": {"healed": {"epoch": 0}, "control": {"epoch": 2}}}
    remarks = {name.partition(":")[0]: remark for name, _, remark in lines(one.changed(cost=kept))}
    assert remarks["healing"].endswith("no epoch lowered the loss, the scalars stay 1")
    assert "epoch" not in remarks["control"]
    assert timeless(one) == timeless(two)
    assert heard[0].startswith("The plan can be exported as ")
    assert all(words in heard[1] for words in ("forward passes", "FLOPs", "s at the pace"))
    state = plain.trained_weights(5, 32, 200)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_model_is_whole_after_a_search_that_breaks_off(model, tmp_path):
    before, model = plain.trained_weights(5, 32, 200), model.train()
    asks = {name: p.requires_grad for name, p in model.named_parameters()}
    for at in (0, 1, 3):
        told = itertools.count()
        watcher = Watcher(begin=lambda title, total, told=told, at=at: 1 // (next(told) != at))
        with pytest.raises(ZeroDivisionError):
            search(model, plain.examples(), 2, batch_size=4, epochs=1, watcher=watcher)
        assert model.training
        assert {name: p.requires_grad for name, p in model.named_parameters()} == asks
        assert all(p.grad is None for p in model.parameters())
        assert not any("forward" in vars(module) for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": 6}, "Cannot remove 6 blocks: the model has 5 layers"),
        ({"blocks": 0}, "blocks: got 0"),
        ({}, "How many blocks"),
        ({"blocks": 2, "criterion": "nll"}, "criterion: got"),
        ({"blocks": 2, "search": "best"}, "search: got"),
        ({"blocks": 2, "granularity": "head"}, "granularity: got"),
        ({"blocks": 2, "given": [1, 2]}, "use both"),
        ({"search": "given", "given": [3, 3]}, "name 3 twice"),
        ({"search": "given", "given": [6]}, "There is no layer 6"),
        ({"search": "given", "given": "three"}, 'given.0: got "three"'),
        ({"blocks": 2, "budget": "soon"}, "The budget is 'soon'"),
        ({"blocks": 2, "confidence": 1.0}, "confidence: got 1"),
        ({"blocks": 2, "chunk": 4}, "Unknown setting 'chunk'. Did you mean 'chunks'"),
    ],
)
def test_nonsense_is_refused_in_one_line(model, options, words):
    with pytest.raises(FulldepthError, match=words) as error:
        find(model, plain.examples(heldout=4), **options)
    assert "\n" not in str(error.value)


def test_models_and_data_that_cannot_be_searched_are_refused(model):
    examples, blank = plain.examples(heldout=4), Example(torch.arange(3, 9), torch.full((6,), -100), 0)
    for name in ("bert", "llama-classifier", "vit"):
        with pytest.raises(FulldepthError, match="is no causal language model"):
            find(tm.build(name), examples, 1)
    with pytest.raises(FulldepthError, match="read a tree"):
        find(tm.build("depth_llama-tree"), examples, 1)
    for data, words in (
        (Examples(examples.train, [], examples.meta), "held-out data are empty"),
        (Examples(examples.train, [blank], examples.meta), "no token counts"),
        (Examples([], examples.heldout, examples.meta), "no examples to fit"),
    ):
        with pytest.raises(FulldepthError, match=words):
            find(model, data, 1, fit=True)
    broken = plain.trained(5, 32, 200)
    with torch.no_grad():
        broken.model.layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(FulldepthError, match="NaN or infinite weights"):
        find(broken, examples, 1)
