"""Reads rows from Parquet files and from data sets of the Hub, through libraries that are imported only then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from trainwire_engine.data.files import RawRow
from trainwire_engine.data.problems import file_invalid
from trainwire_engine.data.rows import SHAPES
from trainwire_protocol.errors import DatasetInvalid

_BATCH = 1000
_AGAIN = "Copy the file again, or store the rows as .jsonl."
_OTHER_KEYS = ("tools", "system", "history", "input", "attention_mask")


class ParquetRows:
    """A Parquet file: its rows count from 1, and only the columns that rows are made of are read."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise DatasetInvalid(
                f"{path} is a Parquet file, and reading it needs pyarrow, which is not installed.",
                hint="pip install 'trainwire[parquet]', or store the rows as .jsonl.",
                path=str(path),
            ) from None
        self.name = str(path)
        try:
            self._file: Any = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except Exception as error:
            raise DatasetInvalid(f"{path} is no Parquet file: {error}.", hint=_AGAIN, path=str(path)) from None
        self.size: int = self._file.metadata.num_rows
        self.position = 0

    def rows(self) -> Iterator[RawRow]:
        """Give every row as JSON. Raises DatasetInvalid."""
        columns = _columns(self._file.schema_arrow.names)
        batches = self._file.iter_batches(batch_size=_BATCH, columns=columns)
        number = 0
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except Exception as error:
                raise DatasetInvalid(f"{self.name} is damaged: {error}.", hint=_AGAIN, path=self.name) from None
            for row in rows:
                number += 1
                self.position = number
                yield RawRow(number, _json(self.name, number, row))


class HubRows:
    """A split of a Hub data set: its rows count from 1."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name = name
        self._rows = rows
        self.size: int = len(rows)
        self.position = 0

    @property
    def content(self) -> str:
        """Names the content, also of the version that was fetched."""
        return f"{self.name} {self._rows._fingerprint}"

    def rows(self) -> Iterator[RawRow]:
        """Give every row as JSON. Raises DatasetInvalid."""
        table = self._rows.select_columns(_columns(self._rows.column_names)).with_format("arrow")
        number = 0
        for batch in table.iter(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                self.position = number
                yield RawRow(number, _json(self.name, number, row))


def hub_splits(name: str) -> dict[str, Any]:
    """Fetch a data set of the Hub, or take it from the library's own cache: its splits by name."""
    try:
        import datasets
    except ImportError:
        raise DatasetInvalid(
            f"There is no file or folder {name}; to read it from the Hub, the library datasets is needed, which is"
            " not installed.",
            hint="pip install 'trainwire[datasets]', or check the path.",
            path=name,
        ) from None
    try:
        return dict(datasets.load_dataset(name))
    except Exception as error:
        raise DatasetInvalid(
            f"The data set {name} cannot be read from the Hub: {type(error).__name__}: {error}.",
            hint="Check the name, the network, and whether the data set needs a login.",
            path=name,
        ) from None


def _columns(names: list[str]) -> list[str]:
    """The columns that rows are made of; all, where none is known, so that the error can name them."""
    known = {key for shape in SHAPES for key in shape.keys} | set(_OTHER_KEYS)
    return [name for name in names if name in known] or list(names)


def _json(name: str, line: int, row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps({key: _without_nulls(value) for key, value in row.items()})
    except (TypeError, ValueError) as error:
        raise file_invalid(name, line, f"it has a value that JSON cannot hold ({error})", None, "row") from None


def _without_nulls(value: Any) -> Any:
    """Leave out null entries of objects: a column has every key that any of its rows has."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
