import datasets
import PIL.Image
import pytest
import torch
from scipy.stats import binom
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulldepth.data import open_source, prepare
from fulldepth.data.labelled import number_labels
from refusals import refused

MERGES = [("w", str(i)) for i in range(9)]


def words(*numbers):
    return " ".join(f"w{n}" for n in numbers)


def all_of(sequences, batch_size=3):
    return list(sequences.batches(batch_size))


def prepared(tokenizer, data, task="causal-lm", **options):
    return prepare(open_source(data), task=task, tokenizer=tokenizer, **options)


def test_causal_windows_and_targets_token_by_token(number_tokenizer):
    texts = [words(0, 1, 2), words(3, 4, 5, 6, 7), words(8)]
    data = prepared(number_tokenizer, texts, sequence_length=4, order="first")
    stream = [2, 3, 4, 1, 5, 6, 7, 8, 9, 1, 10]  # documents with an EOS (1) between them
    rows = torch.tensor([stream[:4], stream[4:8]])
    (batch,) = all_of(data)
    assert torch.equal(batch.inputs["input_ids"], rows)
    assert torch.equal(batch.token_ids, rows)
    assert batch.targets.tolist() == [[3, 4, 1, -100], [6, 7, 8, -100]]
    assert data.num_targets == 6
    assert (data.equal_lengths, data.sequence_length) == (True, 4)
    assert batch.attention_mask.all()
    assert data.warnings == ["3 tokens at the ends of documents do not fill a sequence and are left out."]
    assert batch.labels is None


def test_tokenizer_without_eos_bos_or_pad(bare_tokenizer):
    texts = [words(0, 1, 2), words(3)]
    assert all_of(prepared(bare_tokenizer, texts, sequence_length=4))[0].token_ids.tolist() == [[2, 3, 4, 5]]
    (batch,) = all_of(prepared(bare_tokenizer, texts, "text-classification"))
    assert batch.inputs["input_ids"].tolist() == [[2, 3, 4], [5, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, False, False]]


def test_pairs_have_targets_on_the_response_only(number_tokenizer):
    rows = [
        {"prompt": words(1, 2, 3), "response": words(7, 8)},
        {"prompt": words(4), "response": words(9, 10, 11)},
        {"prompt": words(4), "response": "  "},
    ]
    data = prepared(number_tokenizer, rows)
    (batch,) = all_of(data)
    assert batch.inputs["input_ids"].tolist() == [[3, 4, 5, 9, 10], [6, 11, 12, 13, 0]]
    assert batch.targets.tolist() == [[-100, -100, 9, 10, -100], [11, 12, 13, -100, -100]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 5, [1] * 4 + [0]]
    assert data.num_targets == 5
    assert not data.equal_lengths
    assert data.warnings == ["1 blank records are left out."]


def test_pairs_too_long_are_refused_or_cut(number_tokenizer):
    rows = [{"prompt": words(1, 2, 3), "response": words(*range(n))} for n in (1, 2, 9)]
    arguments = {"sequence_length": 9, "max_positions": 5}
    with refused(r"1 of 3 .* longer than 5 tokens; the longest has 12\..*9.*5"):
        prepared(number_tokenizer, rows, **arguments)
    data = prepared(number_tokenizer, rows, truncate=True, **arguments)
    assert data.lengths == [4, 5, 5]
    assert all_of(data)[0].targets[2].tolist() == [-100, -100, 2, 3, -100]
    assert data.warnings == ["1 of 3 prompts with their responses are longer than 5 tokens and cut there."]


def test_masking_rate_targets_and_specials(bert_tokenizer):
    text = words(*(i % 500 for i in range(62 * 200)))
    data = prepared(bert_tokenizer, [text], "masked-lm", sequence_length=64, max_sequences=200)
    assert len(data) == 200
    masked = ordinary = 0
    for index, batch in enumerate(data.batches(7)):
        ids, inputs, targets = batch.token_ids, batch.masked_inputs["input_ids"], batch.targets
        assert torch.equal(batch.inputs["input_ids"], ids), "what is not the lens reads the text as it is"
        assert torch.equal(batch.masked_inputs["attention_mask"], batch.inputs["attention_mask"])
        start = index * 7 * 62
        expected = torch.tensor([i % 500 + 5 for i in range(start, start + len(batch) * 62)]).view(len(batch), 62)
        assert torch.equal(ids[:, 1:-1], expected)
        assert (ids[:, 0] == 2).all()
        assert (ids[:, -1] == 3).all()
        hidden = inputs == 4
        assert torch.equal(targets != -100, hidden)
        assert torch.equal(targets[hidden], ids[hidden])
        assert torch.equal(inputs[~hidden], ids[~hidden])
        assert not hidden[:, [0, -1]].any()
        assert (hidden.sum(1) >= 1).all()
        for fed in (batch.inputs, batch.masked_inputs):
            assert torch.equal(fed["token_type_ids"], torch.zeros_like(ids))
        masked, ordinary = masked + int(hidden.sum()), ordinary + hidden[:, 1:-1].numel()
    low, high = binom.interval(1 - 1e-6, ordinary, 0.15)
    assert low <= masked <= high
    assert data.num_targets == masked


def test_masks_depend_on_the_seed_and_the_hash_covers_what_they_hide(bert_tokenizer):
    def masked(text, seed=0, most=1):
        options = {"sequence_length": 22, "max_sequences": most, "seed": seed, "order": "first"}
        data = prepared(bert_tokenizer, [text], "masked-lm", **options)
        return data.hash, all_of(data)[0].masked_inputs["input_ids"]

    text = words(*range(20))
    first, ids = masked(text)
    assert masked(text)[0] == first != masked(text, seed=1)[0]
    assert torch.equal(masked(words(*range(60)), most=3)[1][:1], ids), "whatever the other sequences"
    hidden = int((ids[0] == 4).nonzero()[0]) - 1  # of the 20 words; the frame's [CLS] stands before them
    other, same = masked(words(*[99 if i == hidden else i for i in range(20)]))
    assert torch.equal(ids, same)
    assert other != first, "a token under a mask"


def test_without_a_mask_token_there_are_no_targets(number_tokenizer):
    data = prepared(number_tokenizer, [words(1, 2, 3)], "masked-lm", sequence_length=3)
    (batch,) = all_of(data)
    assert batch.inputs["input_ids"].tolist() == [[3, 4, 5]]
    assert batch.masked_inputs is None
    assert batch.targets is None
    assert "no mask token" in data.no_targets
    assert not data.masked


def test_classification_refuses_cuts_or_leaves_out_long_texts(bert_tokenizer):
    rows = [{"text": words(*range(n)), "label": n % 2} for n in (2, 3, 9)]
    options = {"task": "text-classification", "sequence_length": 6}
    for more, reason in (({}, "sequence_length is 6"), ({"max_positions": 6}, "model reads at most 6")):
        with refused(f"row 3 .*11 tokens.*{reason}"):
            prepared(bert_tokenizer, rows, **more, **options)
    kept = prepared(bert_tokenizer, rows, skip_bad=True, **options)
    assert ([example.class_index for example in kept.examples], len(kept.warnings)) == ([0, 1], 1)
    data = prepared(bert_tokenizer, rows, truncate=True, **options)
    (batch,) = all_of(data)
    assert batch.inputs["input_ids"].tolist() == [[2, 5, 6, 3, 0, 0], [2, 5, 6, 7, 3, 0], [2, 5, 6, 7, 8, 3]]
    assert batch.labels.tolist() == [0, 1, 1]
    assert (data.num_targets, data.num_classes, len(data.warnings), batch.targets) == (3, 2, 1, None)


@pytest.fixture
def dropping_tokenizer():
    """`w0` is 0, `w1` is 1, ...; other words give no token, as a BPE without an unknown token drops them."""
    core = Tokenizer(models.BPE({f"w{i}": i for i in range(9)} | {"w": 9} | {str(i): 10 + i for i in range(9)}, MERGES))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_texts_without_a_token_are_left_out_and_counted(dropping_tokenizer):
    rows = [{"text": text, "label": label} for text, label in (("w1 w2", 0), ("???", 1), ("w3", 1), ("!", 0))]
    data = prepared(dropping_tokenizer, rows, "text-classification")
    assert [(e.input_ids.tolist(), e.class_index) for e in data.examples] == [([1, 2], 0), ([3], 1)]
    assert len(data.clusters) == 2
    assert data.warnings[0].startswith("2 texts")
    with refused("no sequence"):
        prepared(dropping_tokenizer, rows[1::2], "text-classification")


def test_two_sentences_as_the_tokenizer_joins_them(bert_tokenizer):
    rows = [
        {"sentence1": words(1), "sentence2": words(2, 3), "label": 0},
        {"sentence1": words(1, 2, 3, 4), "sentence2": words(5), "label": 1},
    ]
    (batch,) = all_of(prepared(bert_tokenizer, rows, "text-classification", sequence_length=7, truncate=True))
    assert batch.inputs["input_ids"].tolist() == [[2, 6, 3, 7, 8, 3, 0], [2, 6, 7, 8, 3, 10, 3]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1]]


def test_representation_cuts_a_long_plain_text_into_pieces(bert_tokenizer):
    data = prepared(bert_tokenizer, [words(0, 1, 2, 3, 4), words(7)], "representation", sequence_length=4)
    assert [e.input_ids.tolist() for e in data.examples] == [[2, 5, 6, 3], [2, 7, 8, 3], [2, 9, 3], [2, 12, 3]]


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_batches_do_not_depend_on_batch_size_or_world(bert_tokenizer, task):
    text = words(*(i % 499 for i in range(700)))

    def rows(batch_size, world):
        data = prepared(bert_tokenizer, [text], task, sequence_length=16, words=("w3",))
        found = {}
        for rank in range(world):
            for batch in data.batches(batch_size, rank, world):
                fed = (batch.masked_inputs or batch.inputs)["input_ids"]
                for i, index in enumerate(batch.sequence.tolist()):
                    assert index not in found
                    found[index] = [x[i].tolist() for x in (fed, batch.targets, batch.token_ids, batch.words)]
        return data.hash, found

    reference = rows(1, 1)
    assert len(reference[1]) == (700 + 1) // 15 if task == "causal-lm" else 700 // 14  # [CLS] before every window
    for batch_size, world in [(3, 1), (2, 3)]:
        assert rows(batch_size, world) == reference


def test_words_are_marked_and_missing_ones_reported(number_tokenizer):
    data = prepared(number_tokenizer, [words(5, 1, 5, 2)], words=("w5", "w9"))
    assert all_of(data)[0].words.tolist() == [[0, -1, 0, -1]]
    assert data.warnings == ["The word 'w9' occurs nowhere in the sequences."]


def test_labels_of_other_names_and_another_number_are_refused():
    """A sample of a stream may lack a class, after which every later one would have another number."""
    rows = [{"text": words(number), "label": "bcd"[number % 3]} for number in range(90)]
    stream = datasets.Dataset.from_list([*rows, {"text": "w1", "label": "a"}]).to_iterable_dataset()
    with refused(r"has 3 classes \(b, c, d\), and the model 4 of other names \(LABEL_0"):
        number_labels(open_source(stream, limit=10), [f"LABEL_{number}" for number in range(4)])


@pytest.mark.parametrize(
    ("folders", "classes", "expected", "matched"),
    [
        (("0", "3", "11"), 1000, (0, 3, 11), "by these numbers"),  # some classes of a large model
        (tuple(map(str, range(12))), 12, tuple(range(12)), "by these numbers"),
        (tuple(map(str, range(1, 13))), 12, tuple(range(12)), "by their order"),
    ],
)
def test_class_folders_that_are_numbers_are_the_classes_of_these_numbers(tmp_path, folders, classes, expected, matched):
    """Text sorts 10 before 2: the third folder by name is no third class."""
    for folder in folders:
        (tmp_path / folder).mkdir()
        PIL.Image.new("RGB", (4, 4)).save(tmp_path / folder / "picture.png")
    source = number_labels(open_source(tmp_path), [f"LABEL_{number}" for number in range(classes)])
    labels = [record.label for record in source.records]  # in the order of the folders' names
    assert labels == [label for _, label in sorted(zip(folders, expected, strict=True))]
    assert source.class_names == tuple(f"LABEL_{number}" for number in range(classes))
    assert [warning.endswith(f"they are matched {matched}.") for warning in source.warnings] == [True]


BY_ORDER = "they are matched by their order."
FOLLOWED = [
    (["POS", "neutral", "NEG"], [2, 0, 2], None),
    (["NEG", "Neg", "neg", "pos"], [1, 3, 1], None),  # the same spelling comes first
    *(
        ([a, b], [0, 1, 0], (f"The data's classes (Neg, pos) are not the model's ({a}, {b}); {BY_ORDER}",))
        for a, b in (("LABEL_0", "LABEL_1"), ("cat", "dog"))  # names that say nothing, and other names
    ),
]


@pytest.mark.parametrize(("classes", "labels", "warnings"), FOLLOWED)
def test_labels_follow_the_models_names(bert_tokenizer, classes, labels, warnings):
    rows = [{"text": words(i), "label": name} for i, name in enumerate(["Neg", "pos", "Neg"])]
    source = number_labels(open_source(rows), classes)
    data = prepare(source, task="text-classification", tokenizer=bert_tokenizer)
    assert all_of(data)[0].labels.tolist() == labels
    assert source.warnings == (warnings or ())
    assert data.class_names == (tuple(classes) if warnings is None else ("Neg", "pos"))
    unknown = open_source([*rows, {"text": "w1", "label": "odd"}])
    if warnings is None:
        with refused("rows row 4"):
            number_labels(unknown, classes)
        kept = number_labels(unknown, classes, skip_bad=True)
        assert [record.label for record in kept.records] == labels


LABELLED, PAIRS = [{"text": words(1), "label": 4}], [{"prompt": "w1", "response": "w2"}]
REFUSED = [
    (["w1"], {"task": "image-classification"}, "image-classification"),
    (PAIRS, {"task": "masked-lm"}, "pairs"),
    (["w1"], {"tokenizer": None}, "is text, and the model has no tokenizer"),
    (["w1"], {"max_sequences": 0}, "max_sequences"),
    (["w1"], {"max_positions": 128}, "128"),
    (["w1"], {"task": "masked-lm", "sequence_length": 2}, "sequence_length"),
    (LABELLED, {"task": "representation", "sequence_length": 1}, "sequence_length"),
    (["w1 w300"], {"vocab_size": 100}, "Wrong tokenizer: it has .* tokens and gave the id 3"),
]


@pytest.mark.parametrize(("data", "options", "name"), REFUSED)
def test_what_does_not_fit_is_refused(bert_tokenizer, data, options, name):
    with refused(name):
        prepared(**{"data": data, "tokenizer": bert_tokenizer, **options})
