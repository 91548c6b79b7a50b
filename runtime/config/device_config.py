"""`KernelConfig` and `ParallelConfig`, groups of `EngineConfig`: the kernels, and the devices and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from ..errors import ConfigError
from .setting_declaration import Alias, check_at_least, check_finite

AttentionBackendName = Literal["fa3", "triton", "native", "torch_native"]
MAX_REPLICAS: Final = 64
ATTENTION_BACKENDS: Final[tuple[AttentionBackendName, ...]] = ("fa3", "triton", "native", "torch_native")
ExecutorName = Literal["local", "ray"]
DispatchPolicyName = Literal["prefix-affinity", "round-robin", "shortest-queue", "least-tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Which kernels compute, and how they are launched."""

    attention_backend: Annotated[
        str | None,
        "Attention kernels: fa3, triton, native or torch_native; two names with a comma are for "
        "prefill and decode (default: the first that is supported).",
    ] = None
    deterministic: Annotated[
        bool,
        "Batch-invariant results: the same bits for a request alone or in a batch, cached or not, "
        "chunked or not; CPU with bfloat16 only, and slower.",
    ] = False
    record_steps: Annotated[
        bool | Literal["auto"],
        "Record steps once and replay them, which saves host time: decodes and prompts as CUDA graphs on a GPU, "
        "decodes as one call to the engine's own kernels on a CPU.",
        Alias("cuda_graph"),
        Alias("disable_cuda_graph", {True: False}),
        Alias("enforce_eager", {True: False}),
    ] = "auto"
    max_recorded_bs: Annotated[
        int | Literal["auto"],
        "Largest decode batch that is recorded as a whole; larger ones are replayed in pieces on a GPU, or launched "
        "kernel by kernel.",
        Alias("cuda_graph_max_bs"),
    ] = "auto"
    avoid_kernels: Annotated[
        tuple[str, ...],
        "Components to do without, NAME,...: a package (triton), one of its operations (triton:rms_norm), fa3, "
        "prompt_graphs, decode_graphs, sampler_graphs or pdl; docs/cuda.md lists them. May be repeated.",
    ] = ()

    def __post_init__(self) -> None:
        check_at_least("max_recorded_bs", self.max_recorded_bs, 1)
        parse_attention_backend(self.attention_backend)
        if not all(self.avoided):
            raise ConfigError(
                f"avoid_kernels is {','.join(self.avoid_kernels)!r}, but it must be names with commas between them: "
                "--avoid-kernels fa3,triton:rms_norm"
            )

    @property
    def avoided(self) -> tuple[str, ...]:
        """The names in `avoid_kernels`, each by itself."""
        return tuple(name.strip() for names in self.avoid_kernels for name in names.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many devices share one model, how many replicas serve it, and how their processes find each other."""

    tp: Annotated[
        int,
        "Tensor parallel size: devices (on the CPU: processes) that share each layer.",
        Alias("tensor_parallel_size"),
        Alias("tp_size"),
    ] = 1
    pp: Annotated[
        int,
        "Pipeline parallel size: stages that each compute a part of the layers, one after the other, with --tp devices "
        "each.",
        Alias("pipeline_parallel_size"),
        Alias("pp_size"),
    ] = 1
    pp_layers: Annotated[
        str | None,
        "Layers of each stage, as in 10,12,8 (default: stages of about equal weights, counting the output head).",
    ] = None
    dp: Annotated[
        int,
        "Replicas of the model behind one address, each with its own scheduler, KV pool and prefix cache, and on GPUs "
        "with --tp devices of its own; they share the CPU's cores and memory.",
        Alias("data_parallel_size"),
        Alias("dp_size"),
    ] = 1
    dispatch_policy: Annotated[
        DispatchPolicyName,
        "Which replica gets a request: the one with most of its prompt in the prefix cache unless it is far busier "
        "than another (prefix-affinity), each in turn, the one with the fewest requests, or the one with the fewest "
        "tokens in its requests.",
    ] = "prefix-affinity"
    nnodes: Annotated[int, "Machines that share the model."] = 1
    node_rank: Annotated[int, "Rank of this machine; rank 0 runs the server."] = 0
    dist_init_addr: Annotated[
        str | None,
        "HOST:PORT of machine 0, to which the others connect (and to the next two ports); required "
        "with several machines.",
    ] = None
    cluster_key_file: Annotated[
        str | None, "File with the secret that the machines share; required with several machines."
    ] = None
    dist_timeout: Annotated[
        float, "Seconds that a rank waits for the others in one step before the engine stops."
    ] = 60.0
    one_shot_all_reduce_kib: Annotated[
        int,
        "Sums over ranks up to this size go through memory that the GPUs of a machine share, in one kernel; larger "
        "ones, and with 0 all, through NCCL.",
    ] = 0
    executor: Annotated[
        ExecutorName, "What starts the ranks: this process, or Ray on the machines of its cluster."
    ] = "local"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "nnodes"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("node_rank", self.node_rank, 0)
        check_at_least("one_shot_all_reduce_kib", self.one_shot_all_reduce_kib, 0)
        check_finite("dist_timeout", self.dist_timeout, 0.0, open_end=True)
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank is {self.node_rank}, but with nnodes {self.nnodes} it must lie in [0, {self.nnodes - 1}]"
            )
        self._check_stages()
        if self.num_ranks % self.nnodes:
            name = "tp" if self.pp == 1 else "tp x pp"
            raise ConfigError(
                f"{name} is {self.num_ranks}, but it must be a multiple of nnodes ({self.nnodes})"
            )
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ConfigError(
                f"nnodes is {self.nnodes}, but the address of machine 0 is not set; set --dist-init-addr HOST:PORT"
            )
        if self.dp > MAX_REPLICAS:
            raise ConfigError(
                f"dp is {self.dp}, but one server has at most {MAX_REPLICAS} replicas; start several servers behind a "
                "router"
            )
        if self.dp > 1 and (self.nnodes > 1 or self.executor == "ray"):
            where = "executor ray" if self.executor == "ray" else f"nnodes {self.nnodes}"
            raise ConfigError(
                f"dp is {self.dp} with {where}, but the replicas of a server are on one machine; start a server for "
                "each replica, and a router before them"
            )
        if self.one_shot_all_reduce_kib and self.nnodes > 1:
            raise ConfigError(
                f"one_shot_all_reduce_kib is {self.one_shot_all_reduce_kib} with nnodes {self.nnodes}, but only GPUs "
                "of one machine share memory; leave it out"
            )
        if self.nnodes > 1 and self.num_ranks == 1:
            raise ConfigError(
                f"nnodes is {self.nnodes}, but tp is 1, so there is no rank for another machine; raise --tp or --pp"
            )

    def _check_stages(self) -> None:
        if self.pp > 1 and self.executor == "ray":
            raise ConfigError(
                f"pp is {self.pp} with executor ray, but Ray starts tensor-parallel ranks only; use --executor "
                "local, with --nnodes for several machines"
            )
        layers = parse_pp_layers(self.pp_layers)
        if layers is not None and len(layers) != self.pp:
            raise ConfigError(
                f"pp_layers is {self.pp_layers!r}, which is {len(layers)} stages, but pp is {self.pp}; give a number "
                "of layers for each stage"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that share a model: rank r is rank r % tp of stage r // tp."""
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.num_ranks // self.nnodes

    @property
    def ranks_on_one_host(self) -> int:
        """Ranks that may share one machine's cores and memory, of all replicas; with Ray all of them."""
        return self.num_ranks if self.executor == "ray" else self.dp * self.ranks_per_node

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)


def parse_pp_layers(text: str | None) -> tuple[int, ...] | None:
    """Parse `--pp-layers`: the layers of each stage; None if it is not set.

    Raises:
        ConfigError: not numbers of 1 or more.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"pp_layers is {text!r}, but it must be the number of layers of each stage, 1 or more: --pp-layers 10,12,8"
        )
    return tuple(map(int, parts))


def parse_attention_backend(text: str | None) -> tuple[AttentionBackendName, AttentionBackendName] | None:
    """Parse `--attention-backend`: the names for prefill and for decode; None if it is not set.

    Raises:
        ConfigError: not one or two known names.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    names = [known for part in parts for known in ATTENTION_BACKENDS if known == part]
    if len(names) != len(parts) or len(names) > 2:
        raise ConfigError(
            f"attention_backend is {text!r}, but it must be one or two of {', '.join(ATTENTION_BACKENDS)}; two are for "
            "prefill and decode: --attention-backend fa3,triton"
        )
    return names[0], names[-1]
