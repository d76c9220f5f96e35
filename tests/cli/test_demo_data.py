"""The bundled questions and answers about trainwire: whole rows, real text, nothing twice."""

import json
import re
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

from trainwire_protocol.codec import decode_command
from trainwire_protocol.commands import WORDS
from trainwire_protocol.config import SETTABLE
from trainwire_protocol.errors import BY_CODE

FOLDER = files("trainwire_cli") / "demo_data"
Row = list[dict[str, str]]


def read(split: str) -> list[Row]:
    rows = []
    for line in (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        assert row.keys() == {"messages"}
        rows.append(row["messages"])
    return rows


TRAIN, VALID = read("train"), read("valid")


def asked(row: Row) -> str:
    """What comes before the last answer, as one text."""
    return json.dumps(row[:-1])


def test_there_are_a_few_hundred_rows_to_learn_and_a_few_dozen_to_check() -> None:
    assert 300 <= len(TRAIN) <= 500
    assert 30 <= len(VALID) <= 40


@pytest.mark.parametrize("rows", [TRAIN, VALID], ids=["train", "valid"])
def test_roles_alternate_and_the_assistant_has_the_last_word(rows: list[Row]) -> None:
    for row in rows:
        turns = row[1:] if row[0]["role"] == "system" else row
        assert [message["role"] for message in turns] == ["user", "assistant"] * (len(turns) // 2), row
        assert all(message.keys() == {"role", "content"} for message in row)


@pytest.mark.parametrize("rows", [TRAIN, VALID], ids=["train", "valid"])
def test_texts_are_plain_ascii_without_stray_space(rows: list[Row]) -> None:
    for text in (message["content"] for row in rows for message in row):
        assert text.isascii()
        assert text == " ".join(text.split())
        assert text


def test_answers_are_short() -> None:
    words = [len(message["content"].split()) for row in TRAIN for message in row if message["role"] == "assistant"]
    assert max(words) <= 30
    assert sum(words) / len(words) >= 8


def test_no_question_is_asked_twice() -> None:
    assert [text for text, count in Counter(map(asked, TRAIN + VALID)).items() if count > 1] == []
    opening = Counter(row[0]["content"] for row in TRAIN + VALID if row[0]["role"] == "user" and len(row) == 2)
    assert [text for text, count in opening.items() if count > 1] == []


def test_no_answer_is_worn_out() -> None:
    answers = Counter(row[-1]["content"] for row in TRAIN)
    assert max(answers.values()) <= 4
    assert len(answers) > len(TRAIN) / 3


def test_validation_asks_in_other_words_for_facts_of_the_training_rows() -> None:
    known = {row[-1]["content"] for row in TRAIN}
    assert [row for row in VALID if row[-1]["content"] not in known] == []
    assert {asked(row) for row in VALID}.isdisjoint(asked(row) for row in TRAIN)


def test_some_rows_have_a_system_turn_and_some_several_turns() -> None:
    assert sum(row[0]["role"] == "system" for row in TRAIN) >= 10
    assert sum(sum(message["role"] == "user" for message in row) > 1 for row in TRAIN) >= 10


def test_commands_in_the_answers_are_commands_of_the_protocol() -> None:
    answers = [message["content"] for row in TRAIN for message in row if message["role"] == "assistant"]
    commands = [text for text in answers if text.startswith('{"id"')]
    assert len(set(commands)) >= 10
    for text in commands:
        decode_command(text.encode())


def test_the_words_and_keys_that_an_answer_lists_are_all_there_are() -> None:
    answer = {row[-2]["content"]: row[-1]["content"] for row in TRAIN}
    words = answer["Which words can I type instead of JSON?"].replace("SET key=value", "SET")
    assert set(re.findall("[A-Z_]+", words)) == set(WORDS)
    assert set(re.findall("[a-z_]+", answer["Which keys can be changed while training?"])) - {"and"} == set(SETTABLE)


def test_the_exit_codes_of_the_answers_are_those_of_the_errors() -> None:
    answers = {row[-1]["content"] for row in TRAIN}
    told = {int(match[1]) for text in answers if (match := re.match(r"Exit code (\d+)", text))}
    assert told >= {error.exit_code for error in BY_CODE.values() if error.exit_code is not None}
