"""Push an exported model to the Hugging Face Hub (``burnish export --push``).

The endpoint and the token are those of ``huggingface_hub``: the environment variables
``HF_ENDPOINT`` and ``HF_TOKEN``, or the token of ``hf auth login``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from burnish.errors import BurnishError
from burnish.publish.model_card import CARD
from burnish.secret import without_secrets

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
"""Files of an earlier upload that would be loaded together with, or in place of, the new ones."""


SILENCE_S = 300.0
"""Time in which the hub must answer, or take or send more bytes. Transient failures are retried by
``huggingface_hub``."""


class HubError(BurnishError, RuntimeError):
    """A model cannot be pushed to the hub. The message gives the cause, the fix, and the folder
    with the exported model."""


@dataclass(frozen=True)
class Destination:
    """A repository of the hub, and the commit to add to it."""

    repo: str
    """OWNER/NAME."""
    private: bool = False
    """Create the repository as private."""
    revision: str | None = None
    """Branch of a repository that may exist. None: a new repository, on its main branch."""
    message: str = "Add the model exported by Burnish"

    def upload_command(self, folder: Path) -> str:
        """Return the command that uploads an exported folder."""
        options = ["--private"] if self.private else []
        options += ["--revision", self.revision] if self.revision else []
        return shlex.join(["hf", "upload", self.repo, str(folder), ".", *options])


def check_destination(destination: Destination) -> None:
    """Raise HubError for a push that fails in any case: an invalid name, no token, or offline mode.

    Sends no request. Call this before the export, which can take minutes.
    """
    repo = destination.repo
    owner, slash, name = repo.partition("/")
    if not (slash and owner and name):
        raise HubError(
            f"--push {repo}: a repository of the hub is OWNER/NAME, such as my-name/my-model, "
            "with your user name or your organization as the owner"
        )
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise HubError(
            f"--push {repo} is not a valid name of a repository: {error} Use OWNER/NAME"
        ) from error
    if destination.revision is not None and not destination.revision.strip():
        raise HubError("--revision is empty; give the name of a branch, or omit it")
    if not destination.message.strip():
        raise HubError("--commit-message is empty; give a text, or omit it")
    if constants.HF_HUB_OFFLINE:
        raise HubError("--push needs the network, but HF_HUB_OFFLINE is set; unset it")
    if not get_token():
        raise HubError(
            "--push needs a token with write permission: export HF_TOKEN=..., or run 'hf auth "
            "login' once"
        )


def push(folder: Path, destination: Destination) -> str:
    """Upload the exported ``folder`` and return the URL of the repository.

    The repository is created. An existing one is only used if ``revision`` is set: the branch is
    created if needed, weight files of an earlier upload are deleted, and an existing model card is
    kept. Raises HubError if the hub refuses or cannot be reached; the folder is unchanged.
    """
    session = get_session()
    before, session.timeout = session.timeout, SILENCE_S  # huggingface_hub would wait forever
    try:
        return _push(HfApi(), folder, destination)
    except (HfHubHTTPError, ConnectionFailure, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, HubError):
            raise
        raise HubError(
            f"{_cause(error, destination)}. The exported model is in {folder}; upload it without "
            f"another export: {destination.upload_command(folder)}"
        ) from error
    finally:
        session.timeout = before


def _push(api: HfApi, folder: Path, destination: Destination) -> str:
    repo, revision = destination.repo, destination.revision
    existing = revision is not None
    url = api.create_repo(repo, private=destination.private or None, exist_ok=existing)
    if existing and destination.private and not api.repo_info(repo).private:
        raise HubError(
            f"the repository {repo} is public, so --private has no effect on it; make it private "
            f"in its settings or omit --private. The exported model is in {folder}; upload it with "
            f"{destination.upload_command(folder)}"
        )
    if revision is not None and revision != constants.DEFAULT_REVISION:
        api.create_branch(repo, branch=revision, exist_ok=True)
    ignored = [CARD] if existing and CARD in api.list_repo_files(repo, revision=revision) else None
    api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        revision=revision,
        commit_message=destination.message,
        ignore_patterns=ignored,
        delete_patterns=list(WEIGHT_FILES) if existing else None,
    )
    return str(url)


def _cause(error: Exception, destination: Destination) -> str:
    """Return why the push failed and what to do, without the values of secrets."""
    repo, first = destination.repo, str(error).strip().split("\n")[0]
    detail = without_secrets(first) or type(error).__name__
    causes = (error, error.__cause__)  # an upload in a thread wraps the hub's error
    answers = [e.response for e in causes if isinstance(e, HfHubHTTPError)]
    status = answers[0].status_code if answers else None
    if status == 401:
        return (
            f"the hub does not accept the token ({detail}). Set HF_TOKEN to a valid token, or run "
            "'hf auth login'"
        )
    if status == 403:
        return (
            f"the token may not write to {repo} ({detail}). Use a token with write permission for "
            f"{repo.partition('/')[0]}, or another owner"
        )
    if status == 409 and destination.revision is None:
        return (
            f"the repository {repo} exists, and nothing in it was changed ({detail}). Choose "
            "another name, or add --revision BRANCH to commit to a branch of it (--revision main "
            "for its main branch)"
        )
    if status is not None:
        return f"the hub refused the upload to {repo} ({detail})"
    if isinstance(error, ValueError):
        return f"the upload to {repo} failed ({detail})"
    return (
        f"the hub at {without_secrets(constants.ENDPOINT)} could not be reached, or the upload to "
        f"{repo} broke off ({type(error).__name__}: {detail}). Check the network, the proxy and "
        "HF_ENDPOINT"
    )
