"""`attach`: a running server of this user, for an `engine chat` that names neither a server nor a model.

A second copy of the weights would take memory and seconds. What says how to load a model, as a flag, a file or a
variable, keeps the model in this process.
"""

from __future__ import annotations

from collections.abc import Callable

from ...launch.child.socket_dir import running_servers
from ...runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ...runtime.errors import EngineError
from .answer_form import AnswerForm
from .http import HttpBackend
from .in_process import BASE_SETTINGS


def asks_for_a_model(merged: MergedConfig) -> bool:
    """Whether a setting of the model is given; a seed is one of the answers, too."""
    own = {name: value.origin for name, value in BASE_SETTINGS.items()}
    return any(
        origin not in (DEFAULT_ORIGIN, own.get(name))
        for name, origin in merged.origins.items()
        if name != "seed"
    )


def attach(api_key: str | None, form: AnswerForm, note: Callable[[str], None]) -> HttpBackend | None:
    """Connect to the newest server of this user on this machine that takes the key.

    Args:
        api_key: bearer token; None: there is none.
        form: of the answers.
        note: called with one line about the server that is taken, and about each that is not.

    Returns:
        None: no server runs, or none takes requests.
    """
    servers = [record for record in reversed(running_servers()) if record.url]
    for record in servers:
        try:
            backend = HttpBackend(record.url, api_key=api_key, form=form)
        except EngineError as error:
            note(f"the server at {record.url} is not used: {error}")
            continue
        others = f", the newest of {len(servers)} servers (--url chooses another one)" if servers[1:] else ""
        note(f"attached to {backend.model} {backend.where}{others}; --no-attach loads a model here")
        return backend
    return None
