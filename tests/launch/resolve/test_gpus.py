"""Which GPUs CUDA will show, from a fake NVML and `CUDA_VISIBLE_DEVICES`; what `resolve` makes of them."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import re
from typing import Any

import pytest

from engine.launch.resolve.host_facts import HostFacts
from engine.launch.resolve.nvidia_gpus import DriverGpu, GpuFacts, Gpus, gpus_of_torch, list_gpus, read_gpus
from engine.launch.resolve.resolve import resolve
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.errors import ConfigError

GIB = 1 << 30
SPEC = ModelSpec(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
HOST = HostFacts(
    num_cpus=8,
    num_cores=4,
    cpu_quota=None,
    cpu_flags=frozenset({"avx2"}),
    mem_available_bytes=16 * GIB,
    cgroup_free_bytes=None,
    torch_version="2.9.0",
)
H100, A100, T4 = (9, 0), (8, 0), (7, 5)


def facts(name: str, free_gib: int = 78, capability: tuple[int, int] = H100) -> GpuFacts:
    return GpuFacts(name, 80 * GIB, free_gib * GIB, capability)


class FakeNvml:
    """The functions of the library that the engine calls; a handle is 1 + an index into `devices`.

    `devices`: (uuid, facts, parent, MIG ids): whole GPUs have no parent; of `partitioned` MIG is on.
    """

    def __init__(
        self, devices: list[tuple[str, GpuFacts, int | None]], partitioned: tuple[int, ...] = ()
    ) -> None:
        self.devices, self.partitioned = devices, partitioned
        self.gpus = [number for number, (_, _, parent) in enumerate(devices) if parent is None]

    def __getattr__(self, name: str) -> Any:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("nvml")).lower()
        return object.__getattribute__(self, words)

    def init_v2(self) -> int:
        return 0

    def shutdown(self) -> int:
        return 0

    def device_get_count_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def device_get_handle_by_index_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 1 + self.gpus[index]
        return 0

    def device_get_memory_info(self, handle: ctypes.c_void_p, memory: Any) -> int:
        found = self.facts(handle)
        memory._obj.total, memory._obj.free = found.total_bytes, found.free_bytes
        return 0

    def device_get_name(self, handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = self.facts(handle).name.encode()
        return 0

    def device_get_uuid(self, handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = self.devices[(handle.value or 0) - 1][0].encode()
        return 0

    def device_get_cuda_compute_capability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.facts(handle).compute_capability or (0, 0)
        return 0

    def device_get_mig_mode(self, handle: ctypes.c_void_p, current: Any, pending: Any) -> int:
        if not self.partitioned:
            return 3  # not supported
        current._obj.value = (handle.value or 0) - 1 in self.partitioned
        return 0

    def device_get_max_mig_device_count(self, handle: ctypes.c_void_p, count: Any) -> int:
        count._obj.value = 7
        return 0

    def device_get_mig_device_handle_by_index(self, handle: ctypes.c_void_p, index: int, device: Any) -> int:
        parts = [n for n, (_, _, parent) in enumerate(self.devices) if parent == (handle.value or 0) - 1]
        if not 0 < index <= len(parts):  # there is a gap at 0
            return 6  # not found
        device._obj.value = 1 + parts[index - 1]
        return 0

    def device_get_gpu_instance_id(self, handle: ctypes.c_void_p, number: Any) -> int:
        number._obj.value = handle.value
        return 0

    def device_get_compute_instance_id(self, handle: ctypes.c_void_p, number: Any) -> int:
        number._obj.value = 0
        return 0

    def facts(self, handle: ctypes.c_void_p) -> GpuFacts:
        return self.devices[(handle.value or 0) - 1][1]


WHOLE = FakeNvml(
    [("GPU-aa10", facts("a"), None), ("GPU-aa20", facts("b"), None), ("GPU-bb30", facts("c"), None)]
)
WITH_MIG = FakeNvml(
    [
        ("GPU-aa10", facts("a"), None),
        ("GPU-bb20", facts("b"), None),
        ("MIG-cc30", facts("b 1g.10gb", 10), 1),
        ("MIG-dd40", facts("b 3g.40gb", 40), 1),
    ],
    partitioned=(1,),
)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


def read(root, nvml, environ, **options) -> Gpus:
    def ask_driver() -> list[DriverGpu] | None:
        return list_gpus(lambda library: nvml)

    return read_gpus(root, environ, torch_has_cuda=True, ask_driver=ask_driver, **options)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (None, "abc"),
        ("", ""),
        ("-1", ""),
        ("1", "b"),
        ("2,0", "ca"),
        ("0,-1,1", "a"),
        ("1,7,0", "b"),
        ("1,1", ""),
        (" 2 , 1x", "cb"),
        ("GPU-bb", "c"),
        ("GPU-aa20,GPU-aa1", "ba"),
        ("GPU-aa", ""),  # fits two
        ("GPU-bb30,0", "c"),
        ("0,GPU-bb30", "a"),
        ("nonsense", ""),
    ],
)
def test_the_mask_means_what_it_means_to_cuda(root, mask, shown):
    gpus = read(root, WHOLE, {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})

    assert "".join(gpu.name for gpu in gpus.visible) == shown
    assert gpus.num_hidden == 3 - len(shown)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (None, "b 1g.10gb"),  # one MIG device, and no whole GPU beside it
        ("0", "a"),
        ("1", "b 1g.10gb"),
        ("MIG-dd", "b 3g.40gb"),
        ("MIG-dd40,MIG-cc30", "b 3g.40gb"),
        ("MIG-GPU-bb20/4/0", "b 3g.40gb"),
    ],
)
def test_of_a_gpu_in_parts_one_part_is_shown(root, mask, shown):
    gpus = read(root, WITH_MIG, {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}).visible

    assert [gpu.name for gpu in gpus] == [shown]
    assert gpus[0].compute_capability == H100


def test_without_a_driver_there_are_no_gpus(tmp_path):
    assert read(tmp_path, WHOLE, {}) == Gpus()


def test_torch_is_asked_where_the_drivers_library_is_missing(root, caplog):
    def missing(library):
        raise OSError(library)

    found = (facts("a"),)
    options: dict[str, Any] = {"ask_driver": lambda: list_gpus(missing), "ask_torch": lambda: found}

    with caplog.at_level(logging.WARNING):
        assert read_gpus(root, {}, torch_has_cuda=True, **options) == Gpus(found)
    assert "torch was asked" in caplog.text
    assert read_gpus(root, {"CUDA_VISIBLE_DEVICES": ""}, torch_has_cuda=True, **options) == Gpus()
    assert read_gpus(root, {}, torch_has_cuda=False, **options) == Gpus()


def test_what_torch_prints_becomes_facts_and_a_failure_none():
    assert gpus_of_torch("print(1") == ()
    assert gpus_of_torch("import json; print(json.dumps([['x', 3, 2, 9, 0]]))") == (
        GpuFacts("x", 3, 2, H100),
    )
    assert gpus_of_torch("raise SystemExit(1)") == ()


def test_another_order_is_named_where_it_would_choose_another_gpu(root, caplog):
    read(root, FakeNvml([("GPU-a", facts("x"), None)] * 2), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert not caplog.messages

    read(root, WHOLE, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert "CUDA_DEVICE_ORDER=FASTEST_FIRST is replaced by PCI_BUS_ID" in caplog.text


def resolved(gpus: Gpus, **settings):
    host = dataclasses.replace(HOST, gpus=gpus.visible, num_hidden_gpus=gpus.num_hidden)
    return resolve(merge(from_arguments(settings)).config, SPEC, host)


def test_the_gpu_that_is_judged_is_the_one_that_serves(root):
    """The first GPU of the machine is full, and the engine refused to start on the second."""
    nvml = FakeNvml([("GPU-a", facts("full", 0), None), ("GPU-b", facts("free"), None)])

    with pytest.raises(ConfigError, match="a context of 0 tokens only"):
        resolved(read(root, nvml, {}))
    notes = resolved(read(root, nvml, {"CUDA_VISIBLE_DEVICES": "1"})).notes

    assert notes["device"].startswith("free is visible")
    assert notes["max_total_tokens"]


def test_hidden_gpus_leave_the_cpu_and_are_named(root):
    hidden = read(root, WHOLE, {"CUDA_VISIBLE_DEVICES": ""})

    chosen = resolved(hidden)
    assert chosen.config.model.device == "cpu"
    assert chosen.notes["device"] == "CUDA_VISIBLE_DEVICES hides all 3 GPUs"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES hides all 3 GPUs; name one in it"):
        resolved(hidden, device="cuda")
    with pytest.raises(ConfigError, match=r"this one has 1 \(2 more are hidden by CUDA_VISIBLE_DEVICES\)"):
        resolved(read(root, WHOLE, {"CUDA_VISIBLE_DEVICES": "2"}), tp=3)


def test_of_several_ranks_the_least_gpu_decides(root):
    nvml = FakeNvml(
        [
            ("GPU-a", facts("a", 70), None),
            ("GPU-b", GpuFacts("b", 24 * GIB, 20 * GIB, T4), None),
            ("GPU-c", facts("c", 1), None),  # not used
        ]
    )
    one, two = resolved(read(root, nvml, {})), resolved(read(root, nvml, {}), tp=3, max_model_len=64)

    assert (one.config.model.dtype, two.config.model.dtype) == ("bfloat16", "float32")
    assert one.config.scheduler.chunked_prefill_size == 8192
    assert two.config.scheduler.chunked_prefill_size == 2048


def test_the_capability_of_a_gpu_that_is_not_used_does_not_count(root):
    nvml = FakeNvml([("GPU-a", facts("a", capability=A100), None), ("GPU-b", facts("b", 1, T4), None)])

    assert resolved(read(root, nvml, {})).config.model.dtype == "bfloat16"
