from importlib.resources import files

from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.data.corpus import END_OF_TEXT, novels
from refusals import refused


def test_the_corpus_is_small_old_and_split_by_author():
    folder = files("fulldepth.data")
    assert len(folder.joinpath("corpus.txt.xz").read_bytes()) <= 4 * 2**20
    notice = folder.joinpath("CORPUS.md").read_text()
    authors = {"train": set(), "heldout": set()}
    for novel in novels():
        assert novel.year < 1929
        size = round(len(novel.text.encode()) / 1024)
        assert f"| {novel.part} | {novel.title} | {novel.author} | {novel.year} | {size} |" in notice
        authors[novel.part].add(novel.author)
    assert not authors["train"] & authors["heldout"]
    train, heldout = builtin_texts("train"), builtin_texts("heldout")
    assert sum(map(len, train)) > 9_000_000
    assert sum(map(len, heldout)) > 800_000
    assert not any(c in text for text in train + heldout for c in "\0\f\r\ufeff")
    with refused(r"Unknown part .*'test'.*heldout, train"):
        builtin_texts("test")


def test_tokenizer_is_lossless_deterministic_and_ends_texts():
    texts = [text[:200_000] for text in builtin_texts("train")[:2]]
    tokenizer = train_tokenizer(texts, vocab_size=1000)
    assert len(tokenizer) == 1000
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    for text in ("  Two  spaces\n\ttab", "naïve \u202eRTL \0 </script> 日本 \U0001f600", texts[1][:5000]):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    again = train_tokenizer(texts, vocab_size=1000)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer(texts[0])["input_ids"]) < 0.45 * len(texts[0].encode())  # it did learn merges
