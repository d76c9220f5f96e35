"""Loads a split of the config's data: finds it, tokenizes it or takes it from the cache, checks what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainwire_engine.data.cache import content_key, file_digest, open_or_build
from trainwire_engine.data.dataset import Dataset
from trainwire_engine.data.encode import Encoder, row_invalid
from trainwire_engine.data.files import RawRow, RowFile
from trainwire_engine.data.options import Options
from trainwire_engine.data.parse import parse_row
from trainwire_engine.data.report import DataReport
from trainwire_engine.data.rows import RowError, Shape, shape_of
from trainwire_engine.data.sources import Split, train_files, valid_files
from trainwire_engine.data.store import Store, StoreWriter
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config
from trainwire_protocol.errors import DatasetInvalid
from trainwire_protocol.folders import user_cache

Report = Callable[[str, int, int, str], None]
"""Called with title, done, total and unit while a longer work goes on; at its end with done = total."""

_CHUNK_ROWS = 1000
_CHUNK_BYTES = 2 << 20
_REPORT_SECONDS = 0.2

_NOTICES = {
    "tools_not_in_template": "The chat template does not write the tools of a row: the model never sees them.",
}


@dataclass(frozen=True)
class Notice:
    """Something about the data that a person should know; `code` is for a `log` event."""

    code: str
    message: str


def load_dataset(
    config: Config,
    tokenizer: Tokenizer,
    split: Split,
    report: Report,
    vocab_size: int,
    notices: list[Notice] | None = None,
) -> Dataset | None:
    """Load the training or the validation data of a config.

    None stands for validation data that is missing or empty; `notices` then gets the reason. `vocab_size` is the
    model's number of words. Raises DatasetInvalid, whose details name path, line, field and reason of a bad row.
    """
    notices = [] if notices is None else notices
    files = train_files(config.data) if split == "train" else valid_files(config.data, config.valid_data)
    if split == "valid" and not files:
        why = "There is no validation data" if config.valid_data is None else f"{config.valid_data} does not exist"
        notices.append(Notice("no_validation", f"{why}: evaluation is off."))
        return None
    options = Options(
        config.train_on,
        config.max_seq_length,
        config.on_overlong,
        config.max_train_samples if split == "train" else 0,
    )
    title = "Tokenizing the training data" if split == "train" else "Tokenizing the validation data"
    store = _stored(Path(config.cache_dir or user_cache()), tokenizer, options, files, title, report)
    _check_vocabulary(store, vocab_size)
    dataset = Dataset(store)
    notices.extend(Notice(code, _NOTICES[code]) for code in store.notices)
    if not len(dataset):
        problem = _nothing_left(files, store.report)
        if split == "train":
            raise problem
        notices.append(Notice("no_validation", f"{problem.message} Evaluation is off."))
        return None
    return dataset


def _stored(
    cache: Path, tokenizer: Tokenizer, options: Options, files: list[Path], title: str, report: Report
) -> Store:
    key = content_key([file_digest(file) for file in files], tokenizer.digest, options)

    def build(folder: Path) -> None:
        writer = StoreWriter(folder, [str(file) for file in files])
        try:
            _build(writer, tokenizer, options, files, title, report)
        except BaseException:
            writer.abandon()
            raise
        writer.close()

    return open_or_build(cache / "tokens", key, build, lambda: report(f"{title}, in another process", 0, 1, "builds"))


def _build(
    writer: StoreWriter, tokenizer: Tokenizer, options: Options, files: list[Path], title: str, report: Report
) -> None:
    encoder = Encoder(tokenizer, options)
    opened = [RowFile(file) for file in files]
    total = sum(file.size for file in opened)
    before, last = 0, 0.0
    report(title, 0, total, "bytes")
    for source, file in enumerate(opened):
        for shape, rows in _chunks(file):
            writer.add(source, encoder(str(file.path), shape, rows), options.limit)
            if options.limit and writer.report.rows_used >= options.limit:
                report(title, total, total, "bytes")
                return
            now = time.monotonic()
            if now - last > _REPORT_SECONDS:
                last = now
                report(title, min(before + file.position, total - 1), total, "bytes")
        before += file.size
    report(title, total, total, "bytes")


def _chunks(file: RowFile) -> Iterator[tuple[Shape, list[RawRow]]]:
    """Cut a file's rows into chunks of bounded size; the first row says which shape all have."""
    shape: Shape | None = None
    chunk: list[RawRow] = []
    size = 0
    for row in file.rows():
        if shape is None and row.data is not None:
            try:
                shape = shape_of(parse_row(row.data))
            except RowError as error:
                raise row_invalid(str(file.path), row.line, error) from None
        chunk.append(row)
        size += len(row.data or b"")
        if shape is not None and (len(chunk) >= _CHUNK_ROWS or size >= _CHUNK_BYTES):
            yield shape, chunk
            chunk, size = [], 0
    if chunk and shape is not None:
        yield shape, chunk


def _check_vocabulary(store: Store, vocab_size: int) -> None:
    token, source, line = store.max_token
    if token >= vocab_size:
        place = f"{store.sources[source]}:{line}"
        raise DatasetInvalid(
            f"{place}: token {token} is outside the model's vocabulary of {vocab_size}.",
            hint="The tokenizer and the model do not belong together, or the row was made with another tokenizer.",
            path=store.sources[source],
            line=line,
            token=token,
        )


def _nothing_left(files: list[Path], report: DataReport) -> DatasetInvalid:
    names = ", ".join(str(file) for file in files)
    if not report.rows_read:
        return DatasetInvalid(f"{names} has no rows.", hint="Give a file with at least one row.", path=str(files[0]))
    reasons = ", ".join(f"{entry.count} {reason}" for reason, entry in report.rows_dropped.items())
    return DatasetInvalid(
        f"Of the {report.rows_read} rows of {names} none can be trained on: {reasons}.",
        hint=_WHAT_TO_DO.get(max(report.rows_dropped, key=lambda reason: report.rows_dropped[reason].count)),
        path=str(files[0]),
        rows_dropped=report.as_dict()["rows_dropped"],
    )


_WHAT_TO_DO = {
    "too_long": "Raise max_seq_length, or set on_overlong = truncate.",
    "no_trained_tokens": "Raise max_seq_length, or look at train_on and at the rows' train marks.",
    "no_assistant_turn": "Rows need an assistant turn, or set train_on = all.",
    "turn_not_found": "Set chat_template to one whose turns can be told apart, or train_on = all.",
    "tool_calls_not_in_template": "Set chat_template to one that writes tool calls.",
}
