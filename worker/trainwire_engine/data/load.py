"""Loads a split of the config's data: finds it, tokenizes it or takes it from the cache, checks what came out."""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from trainwire_engine.data.build import Report, build
from trainwire_engine.data.cache import content_key, file_digest, open_or_build
from trainwire_engine.data.dataset import Dataset
from trainwire_engine.data.options import Options
from trainwire_engine.data.problems import unreadable
from trainwire_engine.data.report import DataReport
from trainwire_engine.data.sources import Place, Split, opened, train_places, valid_places
from trainwire_engine.data.store import Store, StoreWriter
from trainwire_engine.data.tables import HubRows
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config
from trainwire_protocol.errors import DatasetInvalid, DiskFull
from trainwire_protocol.folders import user_cache

_NOTICES = {
    "tools_not_in_template": "The chat template does not write the tools of a row: the model never sees them.",
    "reasoning_not_in_template": "The chat template does not write the reasoning of a turn: it is not trained.",
    "no_end_of_turn": "The chat template ends an assistant turn without a mark, or leaves it out of its generation"
    " block: the model does not learn where to stop.",
    "no_end_of_tool_call": "The chat template writes no end mark after a tool call: the model does not learn to stop"
    " there and wait for the result.",
    "no_end_mark": "The tokenizer has no end mark: the model does not learn where a text ends.",
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where no more can be written: the disk, the user's part of it, or the largest file allowed."""


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
    places = train_places(config.data) if split == "train" else valid_places(config.data, config.valid_data)
    if split == "valid" and not places:
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
    work = _Work(Path(config.cache_dir or user_cache()) / "tokens", tokenizer, options, places, title, report)
    try:
        store = work.store(notices)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        hint = "Make room, or set cache_dir to a folder on another disk."
        raise DiskFull(f"Tokenized data does not fit into {work.folder}: {error.strerror}.", hint=hint) from None
    _check_vocabulary(store, vocab_size)
    dataset = Dataset(store)
    notices.extend(Notice(code, _NOTICES[code]) for code in store.notices)
    if not len(dataset):
        problem = _nothing_left(store)
        if split == "train":
            raise problem
        notices.append(Notice("no_validation", f"{problem.message} Evaluation is off."))
        return None
    return dataset


@dataclass
class _Work:
    """What is to be tokenized, and where it is kept."""

    folder: Path
    tokenizer: Tokenizer
    options: Options
    places: list[Place]
    title: str
    report: Report
    _marks: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def store(self, notices: list[Notice]) -> Store:
        """Take the tokens from the cache, or make them and put them there; without one if that is impossible.

        Raises OSError where the disk is full.
        """
        contents = []
        for place in self.places:
            if isinstance(place, HubRows):
                contents.append(place.content)
                continue
            try:
                self._marks[place] = _marks(place)
                contents.append(file_digest(place, self.folder))
            except OSError as error:
                raise unreadable(str(place), error) from None
        key = content_key(contents, self.tokenizer.digest, self.options)
        try:
            return open_or_build(self.folder, key, self._names(), self._build, self._waiting)
        except OSError as error:
            if error.errno in _FULL:
                raise
            why = f"Tokenized data cannot be kept: {error}. The next start tokenizes again."
            notices.append(Notice("no_cache", why))
            return self._uncached()

    def _uncached(self) -> Store:
        """Make the tokens in a folder that is gone with the process."""
        folder = Path(tempfile.mkdtemp(prefix="trainwire-tokens-"))
        try:
            self._build(folder)
            return Store(folder, self._names())
        finally:
            # What is mapped stays.
            shutil.rmtree(folder, ignore_errors=True)

    def _names(self) -> list[str]:
        return [place.name if isinstance(place, HubRows) else str(place) for place in self.places]

    def _build(self, folder: Path) -> None:
        writer = StoreWriter(folder, self._names())
        try:
            sources = [opened(place) for place in self.places]
            build(writer, sources, self.tokenizer, self.options, self.title, self.report)
            self._check_unchanged()
        except BaseException:
            writer.abandon()
            raise
        writer.close()

    def _check_unchanged(self) -> None:
        """Refuse rows of a file that was written to meanwhile: they are not those that the key names."""
        for path, marks in self._marks.items():
            if _marks(path) != marks:
                raise DatasetInvalid(
                    f"{path} was changed while it was read.",
                    hint="Start again when nothing writes to it any more.",
                    path=str(path),
                )

    def _waiting(self) -> None:
        self.report(f"{self.title} in another process", 0, 1, "builds")


def _marks(path: Path) -> tuple[int, ...]:
    """What changes with a file's content."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


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


def _nothing_left(store: Store) -> DatasetInvalid:
    report: DataReport = store.report
    names, first = ", ".join(store.sources), store.sources[0]
    if not report.rows_read:
        return DatasetInvalid(f"{names} has no rows.", hint="Give a file with at least one row.", path=first)
    ordered = sorted(report.rows_dropped.items(), key=lambda item: -item[1].count)
    reasons = ", ".join(f"{entry.count} {reason}" for reason, entry in ordered)
    return DatasetInvalid(
        f"Of the {report.rows_read} rows of {names} none can be trained on: {reasons}.",
        hint=_WHAT_TO_DO.get(ordered[0][0]),
        path=first,
        rows_dropped=report.as_dict()["rows_dropped"],
    )


_WHAT_TO_DO = {
    "too_long": "Raise max_seq_length, or set on_overlong = truncate.",
    "no_trained_tokens": "Raise max_seq_length, or look at train_on and at the rows' train marks.",
    "no_assistant_turn": "Rows need an assistant turn, or set train_on = all.",
    "turn_not_found": "Set chat_template to one whose turns can be told apart, or train_on = all.",
    "tool_calls_not_in_template": "Set chat_template to one that writes tool calls.",
}
