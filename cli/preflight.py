"""`check_start`: the failures of `engine serve` that need no model, found before a model is read or a process started.

Each check is the one of the process that uses the value: that process repeats it, because a file can change between.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from ..runtime.config.answer_config import AnswerConfig
from ..runtime.config.engine_config import EngineConfig
from ..runtime.config.kv_event_settings import parse_kv_events, settings_of_replicas
from ..runtime.config.server_config import ServerConfig
from ..runtime.decision_calibration import read_calibration
from ..runtime.errors import ConfigError

_FOUND: frozenset[str] = frozenset({"auto", "none"})


def check_start(config: EngineConfig) -> None:
    """Check keys, certificates, files and names of a configuration, and that its port is free.

    Raises:
        ConfigError: the first one that would end the start.
    """
    if config.parallel.node_rank == 0:
        check_port(config.server)
        _check_access(config.server)
        _check_folder("state_dir", config.server.state_dir)
        if config.parallel.executor == "local":  # Ray may choose another machine
            _check_kv_events(config.server, config.parallel.dp)
    check_files(config)


def check_files(config: EngineConfig) -> None:
    """Check the names and files of a configuration, besides those of the connections.

    Raises:
        ConfigError: the first one that would end the start.
    """
    if config.parallel.node_rank == 0:
        _check_parsers(config.answers)
        _check_chat_template(config.model.chat_template)
        if config.answers.decision_calibration is not None:
            read_calibration(config.answers.decision_calibration)
        if config.log.decision_log is not None and config.parallel.executor == "local":
            from ..scheduler.journal.log_writer import check_log_file

            for replica in range(config.parallel.dp):
                if (path := config.log.decision_log_of(replica)) is not None:
                    check_log_file(path)
    for name, path in config.adapters.named_paths:  # the files are read with the model
        if not os.path.lexists(os.path.expanduser(path)):
            raise ConfigError(f"--lora {name}={path}: there is no such folder or file; check the path")
    _check_folder("crash_dir", config.log.crash_dir)
    if config.parallel.nnodes > 1 and config.parallel.executor == "local":
        from ..runtime.transport.cluster_ipc import load_cluster_key

        load_cluster_key(config.parallel.cluster_key_file)


def _check_access(server: ServerConfig) -> None:
    if server.needs_key or server.admin_api_key is not None:
        from ..tokenizer_manager.http.guards.auth import read_keys

        read_keys(server)
    if server.ssl_certfile is not None:
        from ..tokenizer_manager.http.port import tls_context

        tls_context(server)


def _check_kv_events(server: ServerConfig, num_replicas: int) -> None:
    settings = parse_kv_events(server.kv_events, server.kv_events_replay)
    if settings is not None:
        from ..scheduler.kv_events.publisher import check_addresses

        for each in settings_of_replicas(settings, num_replicas):
            check_addresses(each)


def _check_parsers(answers: AnswerConfig) -> None:
    if not _FOUND.issuperset((answers.tool_call_parser, answers.reasoning_parser)):
        from ..tokenizer_manager.conversation.detection import check_parser_names

        check_parser_names(answers)


def _check_chat_template(choice: str | None) -> None:
    """Read and compile the template, unless it is a pipe, which can be read once, or the name of one of the model's."""
    if choice is None or _is_pipe(choice) or not (os.path.lexists(choice) or _looks_like_path(choice)):
        return
    from ..tokenizer_manager.conversation.template_choice import check_template_file

    check_template_file(choice)


def _looks_like_path(text: str) -> bool:
    return os.sep in text or text.endswith((".jinja", ".jinja2", ".j2", ".txt", ".json"))


def _check_folder(name: str, value: str | None) -> None:
    """Whether a folder could be made, or written to; nothing is created before it is needed."""
    if value is None:
        return
    folder = Path(value).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    problem = "" if there.is_dir() else "is no folder"
    if not problem and not os.access(there, os.W_OK | os.X_OK):
        problem = "is not writable for this user"
    if problem:
        raise ConfigError(f"{name} is {value!r}, but {there} {problem}; name another folder")


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(Path(path).stat().st_mode)
    except OSError:
        return False


def check_port(config: ServerConfig) -> None:
    """Check the address before the model is loaded; see `check_address`."""
    check_address(config.host, config.port, any_port=" (--port 0 takes a free one)")


def check_address(host: str, port: int, *, option: str = "--port", any_port: str = "") -> None:
    """Check an address.

    Args:
        host, port: the address.
        option: sets the port.
        any_port: how to get a free port, in parentheses.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is not an address of this machine.
    """
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise ConfigError(f"{option} is {port}, but it must lie in [0, 65535]")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (
        OSError,
        UnicodeError,
    ) as error:  # no name of the internet, such as one with a part of 64 characters
        reason = getattr(error, "strerror", None) or "it is no host name"
        raise ConfigError(f"host {host!r} has no address ({reason}); use --host 127.0.0.1") from None
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        # Like the server: connections of a process that has just ended do not count as "in use".
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{where} is in use, maybe by another engine; stop it, or use {option} {port + 1}{any_port}"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"ports below 1024 need privileges, not {where}; use {option} 30000"
                ) from None
            raise ConfigError(
                f"cannot listen on {where}: {error.strerror}; see --host and {option}"
            ) from None
