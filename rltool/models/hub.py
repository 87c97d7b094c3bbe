"""Models by name: a directory on this host, or one of the Hugging Face hub, fetched once into its cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rltool.config.train import TrainConfig
from rltool.errors import UsageError

_HUB_NAME = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?$")
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What engines and trainer read of a repository; weights in other formats are left where they are."""


def local_model(path: Path, *, setting: str = "model.path", files: tuple[str, ...] = FILES) -> Path:
    """The directory of a model: `path` itself, or, where it is OWNER/NAME or OWNER/NAME@REVISION
    and there is no path OWNER, that of the hub's cache.

    files: what to fetch. Anything else is returned as it is, for its reader to report what is wrong. Raises UsageError
    for a model that cannot be fetched, and names the missing files where HF_HUB_OFFLINE forbids to fetch them.
    """
    found = _HUB_NAME.match(str(path))
    if found is None or Path(found["name"]).parent.exists():
        return path
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise UsageError(
            f"{setting}: {path} does not exist here, and to fetch it from the Hugging Face hub the package "
            "huggingface_hub is needed: pip install 'rltool[train]'"
        ) from error
    download = cast("Callable[..., str]", huggingface_hub.snapshot_download)  # pyright: ignore[reportUnknownMemberType]
    try:
        return Path(
            download(found["name"], revision=found["revision"], allow_patterns=list(files))
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        if constants.HF_HUB_OFFLINE:
            raise UsageError(
                f"{setting}: {path} is not (or not completely) in the cache of the Hugging Face hub, "
                f"{constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to fetch it; run `hf download {found['name']}` "
                f"where there is a network, or give a directory ({reason})"
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise UsageError(
                f"{setting}: {path} is neither a directory here nor a model of the Hugging Face hub that you may read; "
                "check the name, or log in with `hf auth login`"
            ) from error
        raise UsageError(f"{setting}: {path} cannot be fetched from the Hugging Face hub: {reason}") from error


def with_local_models(config: TrainConfig, *, trains: bool = True) -> TrainConfig:
    """The same with a directory for every model that it names. trains: False leaves those alone that only a trainer
    reads."""
    model = _with_local(config.model, "model", ("path", "teacher_path") if trains else ("path",))
    critic = _with_local(config.critic, "critic", ("path",) if trains else ())
    models = {name: _with_local(entry, f"models.{name}", ("path",)) for name, entry in config.models.items()}
    return config.model_copy(update={"model": model, "critic": critic, "models": models})


def _with_local(section: Any, name: str, keys: tuple[str, ...]) -> Any:
    given = {key: value for key in keys if (value := getattr(section, key)) is not None}
    return section.model_copy(update={key: local_model(value, setting=f"{name}.{key}") for key, value in given.items()})
