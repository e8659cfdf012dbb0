"""A folder of a model to the Hugging Face hub, when there is a token for it."""

import re
from pathlib import Path

from stop_mim.errors import InputError, MissingExtra


def require_push(repository: str) -> None:
    """Refuse to begin what could not be pushed in the end."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository, re.ASCII):
        raise InputError(f"push is '{repository}': give OWNER/NAME, such as somebody/stop-vitb16.")
    _token()


def push_folder(folder: Path, repository: str) -> str:
    """Upload all files of a folder; a repository that is not there yet is made, as a private one. Returns its address."""
    token = _token()
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Upload an encoder of stop-mim")
    # The hub and the network fail in their own ways.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(
            f"{repository} could not be pushed ({reason}): {folder} is whole; check the token and the network, then upload it."
        ) from error
    return f"https://huggingface.co/{repository}"


def _token() -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("--push", "huggingface_hub", "hf") from error
    token = huggingface_hub.get_token()
    if not token:
        raise InputError(
            "There is no token for the Hugging Face hub: run 'hf auth login', or set HF_TOKEN, to use --push."
        )
    return token
