"""`load_library`: the C++ kernels as a shared library, compiled on first use by the system's compiler.

It has a plain C interface on raw pointers, without torch's headers, so compiling takes seconds. It is compiled for one
ISA target (`isa`): the best one of this CPU for which there is a file or a capable compiler. `build` decides where it
is stored.

Its thread pool is torch's: the calls to OpenMP are left unresolved, and the loader binds them to the runtime that torch
ships. A second runtime would have its own threads, which would compete with torch's for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from .build import build
from .compiler import ISAS, Isa, NoLibraryError, best_isa, runnable_isas, torch_openmp

OnCall = Callable[["NativeFunction", tuple[Any, ...]], None]


class CallHook(threading.local):
    """The callback that receives the calls of a library's functions made by this thread; usually None.

    Attributes:
        dry_run: calls are reported but not made, except those of functions that return a value.
    """

    on_call: OnCall | None = None
    dry_run: bool = False


class NativeFunction:
    """Calls the library.

    Attributes:
        name: name in the library.
        arguments: one letter per argument, see `library`.
        recorded_form: address of the function that makes a recorded call; None for functions that cannot be part of a
            program.
        returns: it returns a value; such functions have no side effects.
    """

    __slots__ = ("_call_hook", "_function", "arguments", "name", "recorded_form", "returns")

    def __init__(
        self,
        function: ctypes._NamedFuncPointer,
        arguments: str,
        recorded_form: int | None,
        call_hook: CallHook,
    ) -> None:
        self.name = function.__name__
        self.arguments = arguments
        self.recorded_form = recorded_form
        self.returns = function.restype is not None
        self._function = function
        self._call_hook = call_hook

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, then report the call."""
        if self._call_hook.on_call is None:
            return self._function(*arguments)
        result = None if self._call_hook.dry_run and not self.returns else self._function(*arguments)
        self._call_hook.on_call(self, arguments)
        return result


logger = logging.getLogger(__name__)

_FASTER_THAN_TORCH: Final[tuple[Isa, ...]] = tuple(isa for isa in ISAS if isa != "portable")
"""The only architectures with kernels for particular instructions."""

_PATIENCE_S: Final = 60.0
"""If compiling for a target fails after more than this time, no other target is tried: compilers that work fail at
once."""

_SIGNATURES: Final[Mapping[str, tuple[str, str]]] = {
    "num_threads": ("i", ""),
    "packed_linear_bytes": ("n", "nn"),
    "pack_linear": ("", "pnnp"),
    "pair_linear": ("", "pnn"),
    "linear_to": ("", "pnpppnnni"),
    "linear_rows": ("", "pppnnn"),
    "compressed_linear_bytes": ("n", "pnn"),
    "compress_linear": ("", "pnnp"),
    "decompress_linear": ("", "pnnp"),
    "compressed_linear_to": ("", "pnpppnnni"),
    "compressed_linear_rows": ("", "pppnnn"),
    "blocks_are_fast": ("i", ""),
    "packed_blocks_bytes": ("n", "nniii"),
    "pack_blocks": ("", "pppnniip"),
    "packs_rows": ("i", "i"),
    "scan_rows": ("", "pnipnpnnpp"),
    "pack_rows": ("i", "pnipnpnpniiiippn"),
    "pair_blocks": ("", "pnniiii"),
    "blocks_workspace_bytes": ("n", "nnn"),
    "blocks": ("", "pnppppnnniiifiinpin"),
    "blocks_rows": ("", "pppnniiifpi"),
    "packed_superblocks_bytes": ("n", "nni"),
    "pack_superblocks": ("i", "pnppnnnip"),
    "superblocks_rows": ("", "pppnni"),
    "route": ("", "ppppnnnnnniiffi"),
    "token_groups_bytes": ("n", "nn"),
    "group_tokens": ("", "ppnn"),
    "take_tokens": ("", "pnpppnnnn"),
    "multiply_experts": ("", "pppppnnnnin"),
    "activate_experts": ("", "ppppnnnffff"),
    "add_shares": ("", "pppppnnnn"),
    "add_rms_norm": ("", "ppppnnfii"),
    "silu_and_mul": ("", "ppnni"),
    "clamped_swiglu": ("", "ppnnffffi"),
    "gelu_and_mul": ("", "ppnni"),
    "gelu_erf_and_mul": ("", "ppnni"),
    "add_layer_norm": ("", "pppppnnfi"),
    "activate": ("", "pnii"),
    "rotate_and_store": ("", "ppppppppppnnnnnfiiiiipii"),
    "head_matmul": ("", "pnnpnpnnnnnn"),
    "store_latent": ("", "pnnpnnppppppnnnnfiiii"),
    "new_attention_plan": ("p", "pnnnnnniiiff"),
    "free_attention_plan": ("", "p"),
    "plan_attention": ("", "ppppppn"),
    "attend": ("", "ppnppppppi"),
    "sample_tokens": ("", "pnppppppnppnn"),
    "token_logprobs": ("", "pnpppppnnn"),
    "take_rows": ("", "pppnnfi"),
    "scale": ("", "pnfi"),
    "soft_cap": ("", "pnf"),
    "add": ("", "ppni"),
    "add_gated": ("", "pppnni"),
    "mul_sigmoid": ("", "ppnni"),
    "widen": ("", "ppn"),
    "short_conv": ("", "ppppppnnni"),
    "gated_delta": ("", "pppppppppppnnnnnnfi"),
    "mamba2": ("", "ppppppppppppnnnnnnfffi"),
    "ids_below": ("", "ppnn"),
    "gelu_times": ("", "ppnnni"),
    "sparse_gelu_and_mul": ("", "ppnnfi"),
    "altup_stack": ("", "pppnnni"),
    "altup_predict": ("", "pppppnnnnfi"),
    "altup_correct": ("", "pppppnnnnfi"),
    "altup_spread": ("", "ppnnni"),
    "altup_add": ("", "pppnnnii"),
    "lora_add": ("", "pnppppnpnppnnnii"),
    "lora_gated": ("", "pnpppppnpnppnn"),
    "lora_embed": ("", "pppppnppnni"),
    "run_program": ("", "pn"),
}
"""Return and argument types of each function: p is a pointer, n an int64, f a float, i an int."""

_HOUSEKEEPING: Final = frozenset({"free_attention_plan"})
"""Functions that are never part of a step: their calls are not recorded."""

_C_TYPES: Final = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
    "": None,
}


def reasons_against_library() -> list[str]:
    """Reason why the C++ kernels should not be used here; empty: they should. Compiles them if necessary.

    Calling it also prepares the first start: `make` and container images do that.
    """
    if best_isa() not in _FASTER_THAN_TORCH:
        return [
            "this CPU has no AVX2 with FMA; the engine's own kernels are not faster than torch's without them"
        ]
    try:
        library = load_library()
    except NoLibraryError as error:
        return [str(error)]
    if library.num_threads() == 1 < torch.get_num_threads():
        return [
            f"would run on one thread instead of {torch.get_num_threads()}: torch's OpenMP runtime lacks what the "
            "compiler's code calls; install GCC (Debian: apt install g++)"
        ]
    return []


def load_library(isa: Isa | None = None) -> ctypes.CDLL:
    """The library, with its functions' types declared; the same object for the same ISA target.

    Args:
        isa: the target to compile for; None: the best target that this process can run and that can be built or loaded.

    Raises:
        NoLibraryError: there is none and it cannot be built, or this process cannot run it; the message says why. If
            the best target fails, a warning states the cost, once.
    """
    # Also requests AMX registers, without which AMX instructions end the process.
    if isa is not None and isa not in runnable_isas():
        raise NoLibraryError(f"this process cannot run {isa}, only {', '.join(runnable_isas())}")
    loaded = _load_best(best_isa()) if isa is None else _load(isa)
    if isinstance(loaded, str):
        raise NoLibraryError(loaded)
    return loaded


def loaded_isa() -> Isa:
    """The ISA target of the library that `load_library()` returns.

    Raises:
        NoLibraryError: see `load_library`.
    """
    library = load_library()
    return next(isa for isa in runnable_isas() if _load(isa) is library)


@functools.cache
def _load_best(best: Isa) -> ctypes.CDLL | str:
    """The library of the best ISA target, or of the next one that is useful; or why there is none.

    Assemblers support AMX since binutils 2.36, compilers bfloat16 since GCC 10; and an image without a compiler may
    ship a library for an older CPU. A failure is cached, too, so that it costs time and warns only once.
    """
    started_s = time.monotonic()
    failures: list[str] = []
    isas = runnable_isas()
    for isa in isas[isas.index(best) :]:
        if failures and (isa not in _FASTER_THAN_TORCH or time.monotonic() - started_s > _PATIENCE_S):
            break
        loaded = _load(isa)
        if not isinstance(loaded, str):
            if failures:
                logger.warning("cpu_kernels=%s instead of %s: %s", isa, best, failures[0])
            return loaded
        failures.append(loaded)
    logger.warning(
        "cpu_kernels=none: %s. The engine runs on torch's kernels: answers are equal up to rounding, decoding takes "
        "1.5 to 4 times as long",
        failures[0],
    )
    return failures[0]


@functools.cache
def _load(isa: Isa) -> ctypes.CDLL | str:
    """The library of an ISA target, or why there is none."""
    try:
        return open_library(build(isa))
    except NoLibraryError as error:
        return str(error)


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and declare its functions.

    Raises:
        NoLibraryError: the system's loader refuses it.
    """
    torch_openmp()  # makes torch's OpenMP functions visible, to which the library's calls are bound
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"cannot load the CPU kernels from {path}: {error}") from error
    call_hook = CallHook()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = _C_TYPES[result]
        function.argtypes = [_C_TYPES[argument] for argument in arguments]
        told = NativeFunction(function, arguments, _recorded_form(library, name), call_hook)
        setattr(library, name, function if name in _HOUSEKEEPING else told)
    vars(library)["call_hook"] = call_hook
    return library


def _recorded_form(library: ctypes.CDLL, name: str) -> int | None:
    """Address of the function that makes a recorded call (`program.h`); None if there is none."""
    try:
        function = getattr(library, f"recorded_{name}")
    except AttributeError:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
