"""Datasets of the Hugging Face hub, downloaded and memory-mapped by the package datasets."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa

from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.sources import source, split_candidates
from stop_mim.data.sources.parquet import TableSource, image_column, read_classes
from stop_mim.errors import InputError, MissingExtra
from stop_mim.hub import hub_or_cache


@source("hf", help="hf:OWNER/NAME", prefix="hf:")
def open_hub_dataset(address: str, split: str) -> ImageSource:
    """Open a dataset of the hub, owner/name or owner/name:config."""
    return HubSource(address, split)


class HubSource(TableSource):
    """One split of a dataset."""

    def __init__(self, address: str, split: str) -> None:
        self._dataset, self.split = _load(address, split)
        schema = self._dataset.features.arrow_schema
        self.column = image_column(schema, f"hf:{address}")
        if not len(self._dataset):
            raise InputError(f"The split '{self.split}' of hf:{address} has no rows: choose another split.")
        super().__init__(f"hf:{address}", *read_classes(schema, lambda column: self._table().column(column)))
        self.folders = _folders(address.partition(":")[0])
        self.fetch(0)

    def __len__(self) -> int:
        return len(self._dataset)

    def describe(self, index: int) -> str:
        return f"{self.name}[{self.split}]#{index}"

    def fingerprint(self, times: bool = True) -> str:
        info = self._dataset.info
        downloads = sorted(str(item) for item in (info.download_checksums or {}).items())
        features = self._dataset.features.to_dict()
        return digest([self.name, self.split, len(self), features, info.dataset_size, *downloads])

    def load_column(self, file: int) -> pa.ChunkedArray:
        """The images as they are stored: in the Arrow format the package datasets decodes nothing."""
        return self._table().column(self.column)

    def _table(self) -> pa.Table:
        return self._dataset.with_format("arrow")[:]


def _folders(name: str) -> list[Path]:
    """Return where the package datasets puts the files of a dataset: its caches, or a local dataset itself."""
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return [Path(folder).resolve() for folder in (*caches, name) if Path(folder).is_dir()]


def _load(address: str, split: str) -> tuple[Any, str]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("hf: datasets", "datasets", "hf") from error
    name, _, config = address.partition(":")
    failure: Exception | None = None
    with nullcontext() if Path(name).exists() else hub_or_cache(f"hf:{address}"):
        for candidate in split_candidates(split):
            try:
                return datasets.load_dataset(name, config or None, split=candidate), candidate
            # The hub, the network and loading scripts each fail in their own ways.
            except Exception as error:
                unknown_split = "split" in str(error).lower()
                failure = failure if failure and unknown_split else error
                if not unknown_split:
                    break
        reason = " ".join(str(failure).split()).rstrip(".")
        raise InputError(
            f"hf:{address} (split '{split}') could not be loaded ({reason}): check its name, configuration and split, and "
            "the network."
        ) from failure
