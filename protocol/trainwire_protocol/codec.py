"""Turns messages into lines and lines into messages, by the rules of the wire."""

import json
import math
import re
from typing import Any

import msgspec
import orjson

from .commands import COMMANDS, WORDS, ClientCommand, Generate
from .config import MAX_INT
from .errors import BadEncoding, BadLine, BadParams, CommandRefused, UnknownCommand, UnknownParam
from .events import Event, Line, Message, Progress, RunEvent, Step
from .limits import MAX_LINE_OUT

_encoder = msgspec.json.Encoder()
_message_decoder = msgspec.json.Decoder(Message)
_WORD_LINE = re.compile(r"([A-Z][A-Z_]*)(?:\s+(.*))?", re.DOTALL)
_BIG_INTEGER = re.compile(rb"(?<![.\d])\d{16}")
_TYPED_THROUGHOUT = (Step, Progress)
"""Messages without a field of any type, in which no integer can be too large."""
_NEVER_CUT = ("type", "id", "cause", "config", "non_finite", "truncated", "more")
"""What tells lines apart, what is cut by other means, and the config, whose length is checked before the run."""
_CUTS = ((16_384, 1_024), (4_096, 256), (1_024, 64), (256, 16), (64, 4), (16, 1))


def encode_line(message: Line, max_line: int = MAX_LINE_OUT) -> bytes:
    """Encode a message as one line of printable ASCII with its LF, at most `max_line` bytes.

    Non-finite numbers become null and are named in `non_finite`; texts and lists that are too long are cut
    and named in `truncated` and `more`; lone surrogates become U+FFFD.
    """
    try:
        raw = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
        return _encode_slowly(message, max_line)
    # The encoder turns non-finite numbers into null without a word, so only a line with a null can hide one.
    plain = len(raw) < max_line and raw.isascii() and b"\x7f" not in raw and b"null" not in raw
    if plain and (type(message) in _TYPED_THROUGHOUT or not _BIG_INTEGER.search(raw)):
        return raw + b"\n"
    return _encode_slowly(message, max_line)


def _encode_slowly(message: Line, max_line: int) -> bytes:
    fields: dict[str, Any] = msgspec.to_builtins(message, str_keys=True)
    marks: dict[str, str] = dict(fields.get("non_finite") or {})
    cleaned = {key: _clean(value, key, marks) for key, value in fields.items()}
    if marks:
        cleaned["non_finite"] = marks
    line = ascii_json(cleaned)
    for longest_text, longest_list in _CUTS:
        if len(line) < max_line:
            break
        truncated: list[str] = list(fields.get("truncated") or [])
        more: dict[str, int] = dict(fields.get("more") or {})
        cut = {key: _cut(value, key, longest_text, longest_list, truncated, more) for key, value in cleaned.items()}
        if truncated:
            cut["truncated"] = truncated[:longest_list]
        if more:
            cut["more"] = dict(list(more.items())[:longest_list])
        line = ascii_json(cut)
    return line + b"\n"


def ascii_json(value: Any) -> bytes:
    """Encode JSON as printable ASCII without a line end."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii").replace(b"\x7f", b"\\u007f")


def _clean(value: Any, path: str, marks: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        marks[path] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INT:
        return float(value) if abs(value) < 1e300 else str(value)
    if isinstance(value, str):
        return _whole_text(value)
    if isinstance(value, dict):
        return {_whole_text(str(k)): _clean(v, f"{path}.{k}", marks) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v, f"{path}.{i}", marks) for i, v in enumerate(value)]
    return value


def _whole_text(text: str) -> str:
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _cut(
    value: Any, path: str, longest_text: int, longest_list: int, truncated: list[str], more: dict[str, int]
) -> Any:
    if path in _NEVER_CUT:
        return value
    if isinstance(value, str) and len(value) > longest_text:
        truncated.append(path)
        return value[:longest_text]
    if isinstance(value, list | dict) and len(value) > longest_list:
        more[path] = len(value) - longest_list
        value = value[:longest_list] if isinstance(value, list) else dict(list(value.items())[:longest_list])
    if isinstance(value, dict):
        short = {key: key[:longest_text] for key in value}
        truncated += [f"{path}.{cut}" for key, cut in short.items() if cut != key]
        return {
            short[k]: _cut(v, f"{path}.{short[k]}", longest_text, longest_list, truncated, more)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_cut(v, f"{path}.{i}", longest_text, longest_list, truncated, more) for i, v in enumerate(value)]
    return value


def decode_message(line: bytes) -> Message | dict[str, Any]:
    """Read a line that a worker printed; a message of an unknown type comes back as a dict.

    Raises ValueError if the line is no JSON object with a `type`.
    """
    try:
        return _message_decoder.decode(line)
    except msgspec.ValidationError:
        value = orjson.loads(line)
        if isinstance(value, dict) and isinstance(value.get("type"), str):
            return value
        raise
    except msgspec.DecodeError as error:
        raise ValueError(f"not a protocol line: {error}") from None


def decode_stored(event: dict[str, Any]) -> Event:
    """Rebuild a logged event, so that it can be sent again. Raises msgspec.ValidationError for an unknown type."""
    stored: Event = msgspec.convert(event, RunEvent)
    return stored


class Refusal(Exception):
    """A control line that is answered with an error: what it named, as far as it could be read."""

    def __init__(self, error: CommandRefused, id: int | str | None = None, cmd: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.id = id
        self.cmd = cmd


def decode_command(line: bytes) -> tuple[ClientCommand, bool] | None:
    """Read a control line: the command and whether it came as a word; None for a blank line. Raises Refusal."""
    try:
        text = line.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise Refusal(BadEncoding(f"The line is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}.")) from None
    if not text:
        return None
    if text.startswith("{"):
        return _decode_json(text), False
    return _decode_word(text), True


def _decode_json(text: str) -> ClientCommand:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Refusal(BadLine(f"The line is not JSON: {error}.")) from None
    id_ = value.pop("id", None)
    whole = isinstance(id_, int) and not isinstance(id_, bool) and abs(id_) <= MAX_INT
    if not (id_ is None or whole or (isinstance(id_, str) and len(id_) <= 128)):
        raise Refusal(BadParams("id must be an integer within ±(2^53-1) or a text of at most 128 characters."))
    cmd = value.pop("cmd", None)
    if not isinstance(cmd, str):
        raise Refusal(BadParams("The command names no `cmd`.", allowed=list(COMMANDS)), id_)
    kind = COMMANDS.get(cmd)
    if kind is None:
        import difflib  # takes longer than the rest of this module, and most workers never need it

        near = difflib.get_close_matches(cmd[:64], COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else None
        raise Refusal(
            UnknownCommand(f"There is no command {cmd[:64]!r}.", hint=hint, allowed=list(COMMANDS)), id_, cmd[:64]
        )
    return _convert(kind, value, id_, cmd)


def _convert(kind: type[ClientCommand], parameters: dict[str, Any], id_: int | str | None, cmd: str) -> ClientCommand:
    known = [f.name for f in msgspec.structs.fields(kind) if f.name != "id"]
    for key in parameters:
        if key not in known:
            takes = ", ".join(known) or "no parameters"
            raise Refusal(UnknownParam(f"{cmd} has no parameter {key[:64]!r}; it takes {takes}."), id_, cmd)
    try:
        command = msgspec.convert({"cmd": cmd, **parameters}, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Refusal(BadParams(f"{cmd}: {error}."), id_, cmd) from None
    if isinstance(command, Generate) and (command.prompt is None) == (command.messages is None):
        raise Refusal(BadParams("generate needs either `prompt` or `messages`."), id_, cmd)
    command.id = id_
    return command


def _decode_word(text: str) -> ClientCommand:
    match = _WORD_LINE.fullmatch(text)
    word, rest = match.groups() if match else (None, None)
    if word not in WORDS:
        words = ", ".join(WORDS)
        raise Refusal(BadLine(f"The line is neither a JSON object nor one of {words}: {text[:64]!r}."))
    cmd = WORDS[word]
    if cmd != "set":
        if rest:
            raise Refusal(BadLine(f"{word} takes nothing behind it."), None, cmd)
        return _convert(COMMANDS[cmd], {}, None, cmd)
    key, equals, value = (rest or "").partition("=")
    if not equals or not key.strip():
        raise Refusal(BadLine("SET is written as SET key=value."), None, cmd)
    try:
        parsed = orjson.loads(value.strip())
    except orjson.JSONDecodeError:
        parsed = value.strip()
    return _convert(COMMANDS[cmd], {"values": {key.strip(): parsed}}, None, cmd)
