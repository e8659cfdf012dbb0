"""Downloads from the Hugging Face hub, with checksums; without a connection, its cache is used at once."""

import hashlib
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from stop_mim.errors import InputError, first_line

CONNECT_SECONDS = 3.0


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, or huggingface.co."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def is_reachable() -> bool:
    """Whether the hub can be reached; behind a proxy this is assumed."""
    address = urllib.parse.urlsplit(endpoint())
    if address.scheme in urllib.request.getproxies():
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def hub_or_cache(name: str) -> Iterator[bool]:
    """Make libraries use only the hub's cache if the hub cannot be reached; yield whether it can.

    Args:
        name: what is loaded, for the error if it is not cached and the hub cannot be reached.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    reachable = not before and is_reachable()
    constants.HF_HUB_OFFLINE = not reachable
    try:
        yield reachable
    except (InputError, OSError) as error:
        if reachable or not isinstance(error.__cause__ or error, OSError):
            raise
        raise InputError(
            f"{name} is not in the cache of the Hugging Face hub, and {endpoint()} cannot be reached: check the network."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def fetch(repository: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a repository in the hub's cache; missing files are downloaded.

    The sha256 of large files (LFS) is checked.

    Args:
        repository: OWNER/NAME.
        patterns: names of required files, and glob patterns of optional ones.
    """
    import huggingface_hub

    with hub_or_cache(repository) as reachable:
        if not reachable:
            return _cached(repository, patterns)
        try:
            info = huggingface_hub.HfApi(endpoint()).model_info(repository, files_metadata=True)
            files = [one for one in info.siblings or [] if any(fnmatch(one.rfilename, p) for p in patterns)]
            names = {one.rfilename for one in files}
            if missing := [pattern for pattern in patterns if "*" not in pattern and pattern not in names]:
                raise InputError(f"{repository} on the hub has no file {missing[0]}: check whether it was moved.")
            for one in files:
                path = _download(repository, one.rfilename, one.lfs.sha256 if one.lfs else None)
            return path.parents[one.rfilename.count("/")]
        # The hub and the network raise many different errors.
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{repository} could not be loaded from the Hugging Face hub ({first_line(error).rstrip('.')}): check the "
                "name and the network."
            ) from error


def downloaded_file(repository: str, name: str) -> Path | None:
    """Return a file of a repository from the hub's cache; None if it was not downloaded."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(repository, name)
    return Path(found) if isinstance(found, str) else None


def _cached(repository: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
    for pattern in patterns:
        if "*" not in pattern and not (folder / pattern).exists():
            raise FileNotFoundError(pattern)
    return folder


def _download(repository: str, name: str, sha256: str | None) -> Path:
    import huggingface_hub

    known = downloaded_file(repository, name)
    path = Path(huggingface_hub.hf_hub_download(repository, name, endpoint=endpoint()))
    if sha256 is None or path == known:
        return path
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise InputError(
            f"{name} of {repository} has the sha256 {found[:12]}… and the hub lists {sha256[:12]}…: it was deleted, download "
            "it again."
        )
    return path
