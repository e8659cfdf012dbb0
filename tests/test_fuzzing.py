"""Damaged files are read or refused with a sentence: some of each kind here, many with `pytest -m slow` or the script."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import KINDS, fuzz

from stop_mim.data.data_files import find_files
from stop_mim.data.sources.parquet import ParquetSource
from stop_mim.errors import InputError
from stop_mim.records import from_plain
from stop_mim.training.config import TrainConfig
from stop_mim.training.config_file import read_config
from stop_mim.training.run_folder import RunFolder

IMAGES = ("png", "jpeg", "tiff", "webp")


def counts(kind):
    """How many files of a kind are tried here, and with `pytest -m slow`: a report takes 0.05 seconds, figures take one."""
    return {"run": (50, 2000), "figures": (3, 100)}.get(kind.split()[0], (15, 2000))


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(tmp_path, kind, many):
    first = 1000 if many else 0
    assert fuzz(kind, range(first, first + counts(kind)[many]), tmp_path) == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IMAGES and not kind.startswith("figures")])
def test_a_pipe_in_the_place_of_a_file_is_never_waited_for(tmp_path, kind):
    """Nobody writes to the pipe: to open it would wait for ever."""
    name, write, read = KINDS[kind]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    path.unlink()
    os.mkfifo(path)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    signal.alarm(20)
    try:
        with suppress(InputError):
            read(path)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize(
    ("plain", "named"),
    [
        ({"seed": "3"}, "seed is '3': give a whole number"),
        ({"seed": True}, "seed is True"),
        ({"seed": 10**30}, "seed is 1000"),
        ({"optim": {"epochs": 1e30}}, "optim.epochs is 1e"),
        ({"optim": {"epochs": 10**12}}, "optim.epochs is 1000000000000: give a number from 1 to"),
        ({"optim": {"betas": [0.9]}}, r"optim.betas is \[0.9\]: give 2 values"),
        ({"optim": {"betas": [0.9, "x"]}}, r"optim.betas\[1\] is 'x'"),
        ({"optim": 3}, "optim is 3: give a mapping"),
        ({"encoder": {"image_size": [10**6, 224]}}, "encoder.image_size"),
        ({"positions": {"kind": ["sincos"]}}, r"positions.kind is \['sincos'\]"),
        ({"data": {"a": 1}}, "data is"),
        ({"optim": {"rate": 1}}, "unknown field 'optim.rate'"),
        ({"optim": {"epoch": 1}}, r"did you mean 'optim.epochs'\?"),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_named(plain, named):
    with pytest.raises(InputError, match=named):
        from_plain(TrainConfig, plain)


def test_a_configuration_that_is_too_deep_or_multiplies_itself_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"optim":' * 100_000)
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        RunFolder(tmp_path).config()
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(InputError, match="alias"):
        read_config(tmp_path / "bomb.yaml")


def peak_kib():
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path):
    """In both ways that parquet has: one value of 1 MiB that 512 rows repeat, and zeros that compress."""
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 512, pa.int32()), pa.array([b"x" * 2**20]))
    zeros = pa.array([b"\0" * 2**25] * 2)
    for name, cells, options in (("repeated", repeated, {}), ("zeros", zeros, {"use_dictionary": False})):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"image": cells}), path, store_schema=False, compression="zstd", **options)
        assert path.stat().st_size < 65_000
        child = os.fork()
        if not child:
            code, before = 1, peak_kib()
            try:
                ParquetSource(find_files([str(path)]), name)
            except InputError as error:
                code = 0 if "unpacks to more than 100 times" in str(error) and peak_kib() - before < 200_000 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
