"""Parquet files of images: held in memory when small, else converted once to a memory-mapped Arrow file."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stop_mim.data.cache import cache_folder
from stop_mim.data.image_source import digest
from stop_mim.data.images import MAX_PIXELS
from stop_mim.data.splits import SPLIT_NAMES, choose_split
from stop_mim.data.tables import TableSource, image_column, label_column, read_classes
from stop_mim.errors import InputError
from stop_mim.files import write_atomically

MEMORY_LIMIT = 2 * 2**30
"""Sets of files below this many bytes are held in memory."""

# Small batches: Arrow cannot read 2 GiB of nested bytes into one array.
_ROWS_A_BATCH = 256


class ParquetSource(TableSource):
    """The rows of parquet files, one file after the other."""

    def __init__(self, paths: list[Path], name: str, max_pixels: int = MAX_PIXELS) -> None:
        footers = [_read_footer(path) for path in paths]
        self._ends = np.cumsum([rows for rows, _ in footers])
        if not self._ends[-1]:
            raise InputError(f"{name} has no rows: give parquet files with at least one image.")
        schema = footers[0][1]
        self.column = image_column(schema, str(paths[0]))
        for path, (_, other) in zip(paths, footers, strict=True):
            _check_same_column(path, other, paths[0], schema.field(self.column))
        super().__init__(name, *_read_labels(paths, schema))
        self.paths = paths
        self.max_pixels = max_pixels
        self.open_cells()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def describe(self, index: int) -> str:
        """The file and the row within it."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return f"{self.paths[file]}#{index - (int(self._ends[file - 1]) if file else 0)}"

    def fingerprint(self) -> str:
        """Depends on the names and sizes of the files and on their footers, which tell of every piece of a column."""
        return digest(part for path in self.paths for part in (path.name, path.stat().st_size, _footer_bytes(path)))

    def load_column(self) -> pa.ChunkedArray:
        """The images, from memory or from the memory-mapped file that is written when there is none yet."""
        if sum(path.stat().st_size for path in self.paths) < MEMORY_LIMIT:
            return pa.Table.from_batches(self._batches()).column(0)
        converted = cache_folder() / "arrow" / f"{self.fingerprint()}.arrow"
        if not converted.exists():
            self._convert(converted)
        return pa.ipc.open_file(pa.memory_map(str(converted))).read_all().column(0)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self.paths:
            try:
                for batch in pq.ParquetFile(path).iter_batches(_ROWS_A_BATCH, columns=[self.column]):
                    # The files' own metadata may differ, and batches of one table must not.
                    yield batch.replace_schema_metadata(None)
            except (OSError, pa.ArrowException) as error:
                raise _unreadable(path, error) from error

    def _convert(self, target: Path) -> None:
        batches = self._batches()
        first = next(batches)

        def write(draft: Path) -> None:
            with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)

        try:
            write_atomically(target, write)
        except OSError as error:
            raise InputError(
                f"{self.name} could not be converted to {target} ({error}): set STOP_MIM_CACHE to a folder with room."
            ) from error


def parquet_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a folder (or its 'data' sub-folder) for a split, when their names begin with split names."""
    paths = sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))
    splits = {path: _leading_word(path) for path in paths}
    present = {split for split in splits.values() if split in SPLIT_NAMES}
    if not present:
        return paths
    chosen = choose_split(split, present, str(folder))
    return [path for path in paths if splits[path] == chosen]


def _leading_word(path: Path) -> str:
    match = re.match(r"[a-z]+", path.name.lower())
    return match.group() if match else ""


def _read_footer(path: Path) -> tuple[int, pa.Schema]:
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata.num_rows, file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = str(error).splitlines()[0].rstrip(".")
    return InputError(f"{path} cannot be read as parquet ({reason}): give a whole parquet file.")


def _check_same_column(path: Path, schema: pa.Schema, first_path: Path, column: pa.Field) -> None:
    if column.name not in schema.names or schema.field(column.name).type != column.type:
        raise InputError(f"{path} has no column '{column.name}' like that of {first_path}: give files of one layout.")


def _footer_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-8, 2)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, 2)
        return file.read(length)


def _read_labels(paths: list[Path], schema: pa.Schema) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    column = label_column(schema)
    if column is None:
        return {}, ()
    try:
        chunks = [pq.read_table(path, columns=[column], partitioning=None).column(0) for path in paths]
        return read_classes(pa.chunked_array([piece for chunk in chunks for piece in chunk.chunks]), schema)
    except (pa.ArrowException, KeyError, IndexError) as error:
        raise InputError(
            f"The column '{column}' is not the same in {paths[0]} and the files beside it: give files of one layout."
        ) from error
