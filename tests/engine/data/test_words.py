"""Encoding word by word gives the tokens of the whole text, for every kind of tokenizer it is allowed for."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from data.kit import MARKS, byte_level
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from trainwire_engine.data.patterns import any_of
from trainwire_engine.data.words import WordEncoder
from trainwire_engine.tokenizer import Tokenizer

PIECES = [
    *(" ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\r", "/", "//", ".", ",", "(", ")", ">", "</", "_"),
    *("a", "Ab", "hello", "HELLO", "don't", "'s", "'T", "1", "12", "1234", "é", "e\u0301", "日本", "漢字かな", "안녕"),
    *(
        "🙂",
        "👨\u200d👩",
        "\u200b",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x1c",
        "\x85",
        "\0",
        "▁",
        "ﬁ",
        "ß",
        "İ",
        "٣",
        "ก็",
        "@#x",
    ),
    *("<|im_end|>", "<|im_start|>", "<|end|>", "<|en", "<think>", "<｜User｜>", "user\n", "a/b", ".\n/x", "x:\n    y"),
]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def texts_of(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(PIECES, k=chance.randrange(1, 40))) for _ in range(count)]


def check(backend: Any, texts: Sequence[str], seed: int) -> None:
    """Compare tokens, and the first token at or behind three places, with what the tokenizer says of the whole."""
    backend.post_processor = None
    words = WordEncoder.of(backend)
    assert words is not None
    chance = random.Random(seed)
    places = [sorted(chance.choices(range(len(text) + 1), k=3)) for text in texts]
    for start in range(0, len(texts), 100):
        part, cuts = texts[start : start + 100], places[start : start + 100]
        encodings = backend.encode_batch(part, add_special_tokens=False)
        for text, wanted, at, (ids, found) in zip(part, encodings, cuts, words(part, cuts)):
            assert ids.tolist() == wanted.ids, repr(text)
            assert found == [bisect.bisect_left(wanted.offsets, (place,)) for place in at], (text, at)
    check_cuts(backend, words, texts, chance)


def check_cuts(backend: Any, words: WordEncoder, texts: Sequence[str], chance: random.Random) -> None:
    """Compare the tokens on the two sides of a cut with those of the whole."""

    def tokens_of(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    cuts = 0
    for text in ("".join(chance.choices(texts, k=3)) for _ in range(len(texts) // 2)):
        start = chance.randrange(len(text))
        found = words.cuts_within(text, start, min(len(text), start + 200))
        assert all(start < place < start + 200 for place in found)
        for place in chance.sample(found, min(2, len(found))):
            cuts += 1
            assert tokens_of(text[:place]) + tokens_of(text[place:]) == tokens_of(text), (text, place)
    assert cuts >= 10


def trained_on(pre_tokenizer: Any, normalizer: Any = None) -> Backend:
    """A byte-level tokenizer with merges over spaces and newlines, as far as its pre-tokenizer lets them happen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[AddedToken(mark, special=True) for mark in MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts_of(1, 400), trainer)
    backend.add_tokens([AddedToken("user\n", normalized=True), AddedToken("\n\n\n", normalized=False)])
    return backend


def split(pattern: str) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), last])


@pytest.mark.parametrize(
    "make",
    [
        lambda: trained_on(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        lambda: trained_on(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        lambda: trained_on(split(LLAMA)),
        lambda: trained_on(split(LLAMA), normalizers.NFC()),
    ],
    ids=["gpt2", "digits", "llama", "nfc"],
)
def test_small_tokenizers(make: Callable[[], Backend]) -> None:
    check(make(), texts_of(2, 1500), seed=3)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss"])
def test_real_tokenizers(real_tokenizer: Callable[[str], Path], name: str) -> None:
    tokenizer = Tokenizer.from_folder(real_tokenizer(name), "{{ messages }}")
    code = [Path(__file__).read_text(encoding="utf-8")[i : i + 2000] for i in range(0, 6000, 2000)]
    check(tokenizer.backend, texts_of(4, 1000) + code, seed=5)


@pytest.mark.parametrize("digits", [r"\p{N}", r"\p{N}{1,3}"])
def test_numbers_that_were_never_seen_are_put_together_from_their_digits(digits: str) -> None:
    backend = trained_on(split(LLAMA.replace(r"\p{N}{1,3}", digits)))
    words = WordEncoder.of(backend)
    assert words is not None
    words([*map(str, range(1000)), *(f"{n:03}" for n in range(100)), *"()-. x", "00"], [[]] * 1108)
    texts = ["(1234567)", " 0.000123", "-98765.4", "(7) 00", "2 3", "x 4"]
    wanted = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids, _ in words(texts, [[]] * len(texts))] == wanted
    assert not words._missing


def test_a_bounded_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwire_engine.data.words._KEPT_WORDS", 20)
    check(byte_level(), texts_of(6, 500), seed=7)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda backend: backend.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda backend: backend.add_tokens([AddedToken("<x>", single_word=True)]),
        lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
        lambda backend: setattr(backend, "pre_tokenizer", split(r"\S+\s*|\s+(?!\S)|\s+")),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(backend, "model", models.WordPiece({"a": 0}, unk_token="a")),
    ],
)
def test_tokenizers_of_other_kinds_are_left_alone(spoil: Callable[[Any], Any]) -> None:
    backend = byte_level()
    spoil(backend)
    assert WordEncoder.of(backend) is None


def merging_backend(*merges: tuple[str, str]) -> Backend:
    """A tokenizer of Gemma's kind: spaces become ▁, and merges may go over the whole text."""
    letters = [*"abx>/▁\n", "<"]
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=list(merges), fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


def test_a_vocabulary_says_where_merges_reach_over_spaces() -> None:
    backend = merging_backend(("a", "b"), ("▁", "ab"), ("▁", "/"), (">", "▁/"), ("▁", "▁"), ("\n", "\n"))
    chance = random.Random(8)
    texts = ["".join(chance.choices([*"abx>/ \n▁"], k=12)) for _ in range(500)]
    check(backend, texts, seed=9)


def test_a_vocabulary_with_merges_behind_newlines_is_left_alone() -> None:
    assert WordEncoder.of(merging_backend(("\n", "a"))) is None


def test_the_pattern_of_texts_finds_the_longest() -> None:
    import re

    pattern = re.compile(any_of(["a", "ab", "abc", "b.", "*"]))
    assert pattern.findall("abcd ab aab b.b *") == ["abc", "ab", "a", "ab", "b.", "*"]
