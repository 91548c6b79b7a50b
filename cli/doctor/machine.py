"""The checks of `MachineFacts`, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...launch.child.process_resources import OWN_FILES
from ...launch.resolve.host_facts import usable_threads
from ...launch.resolve.memory_budget import size_text
from ...models.spec.sizes import GIB, MIB
from ...runtime.config.engine_config import EngineConfig
from .check import Check, fail, ok, refused, warn
from .machine_facts import MachineFacts

MIN_PYTHON: Final = (3, 11)
LITTLE_MEMORY_BYTES: Final = 1 * GIB
NCCL_SHM_BYTES: Final = 256 * MIB


def check_machine(facts: MachineFacts, config: EngineConfig, *, port_given: bool = True) -> Iterator[Check]:
    """All checks, in the order of the report. `port_given`: the port is not the default one."""
    yield check_python(facts)
    yield check_packages(facts)
    yield from check_at_start(facts, config)
    yield check_cpus(facts)
    yield check_port_is_free(facts, config, port_given=port_given)
    yield check_server(facts)


def check_at_start(facts: MachineFacts, config: EngineConfig) -> Iterator[Check]:
    """The checks that `engine serve` runs too, because no other part of a start reports them."""
    yield check_driver(facts)
    yield check_memory(facts)
    yield check_shm(facts, config)
    yield check_open_files(facts, config)
    yield check_orphans(facts)
    yield check_socket_dirs(facts)
    yield check_cache(facts)


def check_python(facts: MachineFacts) -> Check:
    """The interpreter."""
    version = ".".join(map(str, facts.python))
    if facts.python < MIN_PYTHON:
        need = ".".join(map(str, MIN_PYTHON))
        return fail("python", f"Python {version}, {need} is needed", f"install Python {need} or later")
    if not facts.is_64_bit:
        return fail("python", f"Python {version} with 32 bits", "install a 64-bit Python")
    if facts.system != "linux":
        return warn("python", f"Python {version} on {facts.system}", "use Linux: nothing else is tested")
    return ok("python", f"Python {version}")


def check_packages(facts: MachineFacts) -> Check:
    """Check the distributions that the engine requires."""
    if not facts.unmet:
        return ok("packages", "all that are required are installed")
    words = ", ".join(
        f"{name} {installed} ({needed} is needed)" if installed else f"{name} is missing"
        for name, needed, installed in facts.unmet
    )
    wanted = " ".join(f"'{name}>={needed}'" if needed else name for name, needed, _ in facts.unmet)
    return fail("packages", words, f"pip install {wanted}")


def check_driver(facts: MachineFacts) -> Check:
    """Check the driver of NVIDIA GPUs; another check tests whether torch can use it."""
    gpus = facts.host.gpus
    if gpus:
        names = ", ".join(f"{gpu.name} with {size_text(gpu.free_bytes)} free" for gpu in gpus)
        return ok("driver", names)
    if facts.host.num_hidden_gpus:
        return warn(
            "driver",
            f"CUDA_VISIBLE_DEVICES hides all {facts.host.num_hidden_gpus} GPUs, so the CPU computes",
            "name one in CUDA_VISIBLE_DEVICES, or unset it",
        )
    if facts.has_nvidia_device:
        return warn(
            "driver",
            "an NVIDIA driver is loaded, but lists no GPU",
            "see what nvidia-smi says: a driver that was updated needs a restart, a container libnvidia-ml.so.1",
        )
    if facts.has_nvidia_card:
        return warn(
            "driver",
            "an NVIDIA GPU is in this machine, but no driver can be seen",
            "install the driver, or start the container with --gpus all; without it the CPU computes",
        )
    return ok("driver", "no NVIDIA GPU: the CPU computes")


def check_memory(facts: MachineFacts) -> Check:
    """Check how much memory can be allocated; the check `fit` tests whether the model fits."""
    host = facts.host
    text = f"{size_text(host.mem_usable_bytes)} can be allocated"
    if host.cgroup_free_bytes is not None and host.cgroup_free_bytes < host.mem_available_bytes:
        text += (
            f" (a limit of the container or cgroup; the machine has {size_text(host.mem_available_bytes)})"
        )
    if host.mem_usable_bytes < LITTLE_MEMORY_BYTES:
        return warn(
            "memory", text, "end other programs, or raise the limit: torch and the processes take half a GiB"
        )
    return ok("memory", text)


def check_shm(facts: MachineFacts, config: EngineConfig) -> Check:
    """Check the shared memory, through which NCCL connects the GPUs of one machine."""
    needs = config.parallel.num_ranks > 1 and config.model.device != "cpu" and bool(facts.host.gpus)
    free = facts.shm_free_bytes
    if free is None:
        if needs:
            return fail("shm", "/dev/shm does not exist", "mount one: mount -t tmpfs tmpfs /dev/shm")
        return ok("shm", "/dev/shm does not exist, and is not needed without several GPUs")
    if needs and free < NCCL_SHM_BYTES:
        return warn(
            "shm",
            f"/dev/shm has {size_text(free)} free, ranks on GPUs share {size_text(NCCL_SHM_BYTES)} and more there",
            "start the container with --shm-size=1g",
        )
    return ok("shm", f"/dev/shm has {size_text(free)} free")


def check_open_files(facts: MachineFacts, config: EngineConfig) -> Check:
    """Check the hard limit on open files: each client connection is one; the server raises the soft limit itself."""
    hard, wanted = facts.open_files[1], config.server.max_connections + OWN_FILES
    if hard < 0 or hard >= wanted:
        return ok("nofile", "open files: no limit" if hard < 0 else f"open files: up to {hard}")
    fix = "raise the hard limit: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker"
    if hard < OWN_FILES:
        return fail(
            "nofile", f"a process may open {hard} files, {OWN_FILES} are needed without any client", fix
        )
    room = hard - OWN_FILES
    return warn(
        "nofile",
        f"a process may open {hard} files: enough for {room} clients, and --max-connections is "
        f"{config.server.max_connections}",
        f"--max-connections {room}, or {fix}",
    )


def check_cpus(facts: MachineFacts) -> Check:
    """Check the number of cores and the CPU quota."""
    host = facts.host
    threads = usable_threads(host)
    text = f"{host.num_cores} cores, {threads} compute"
    if host.cpu_quota is not None and host.cpu_quota < 1:
        return warn(
            "cores",
            f"a quota grants {host.cpu_quota:g} of one CPU, and three processes share it",
            "grant at least 2: --cpus of docker, CPUQuota= of systemd",
        )
    if threads < host.num_cores:
        text += f": a quota grants {host.cpu_quota:g}"
    return ok("cores", text)


def check_port_is_free(facts: MachineFacts, config: EngineConfig, *, port_given: bool) -> Check:
    """Check that the address of the server is free; an engine that has the default port is only a warning."""
    server = config.server
    if not facts.port_error:
        where = f"{server.host}:{server.port}" if server.port else f"{server.host}, any free port"
        return ok("port", f"{where} is free")
    check = refused("port", facts.port_error)
    if facts.port_holder:
        check = check._replace(text=f"{check.text} (it is {facts.port_holder})")
    if not port_given and facts.held_by_engine:
        return warn("port", check.text, check.fix)
    return check


def check_server(facts: MachineFacts) -> Check:
    """Check keys and certificate by reading them as the server does."""
    if facts.server_error:
        return refused("server", facts.server_error)
    return ok("server", "keys and certificate can be read, or none are set")


def check_orphans(facts: MachineFacts) -> Check:
    """Check for processes that outlived their engine; they may hold memory, a GPU or a port."""
    if not facts.orphans:
        return ok("orphans", "no processes of a dead engine")
    words = ", ".join(f"{process.pid} ({process.title})" for process in facts.orphans)
    pids = " ".join(str(process.pid) for process in facts.orphans)
    return warn("orphans", f"processes of a dead engine are left: {words}", f"kill -9 {pids}")


def check_socket_dirs(facts: MachineFacts) -> Check:
    """Check for socket directories of killed engines; they hold no memory."""
    if not facts.socket_dirs:
        return ok("sockets", "no directories of a killed engine")
    names = ", ".join(map(str, facts.socket_dirs))
    return ok("sockets", f"left by a killed engine, and removed by the next start: {names}")


def check_cache(facts: MachineFacts) -> Check:
    """Check the cache folder, which holds the default model and the compiled CPU kernels."""
    if not facts.cache_error:
        return ok("cache", "the cache folder can be written")
    text, _, fix = facts.cache_error.rpartition("; ")
    return warn("cache", text, fix)
