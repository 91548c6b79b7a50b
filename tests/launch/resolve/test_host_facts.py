"""Limits of containers and processors, read from described file trees."""

from __future__ import annotations

import os

import pytest

from engine.launch.resolve.host_facts import read_host_facts, usable_threads

MEMINFO = "MemTotal: 9000000 kB\nMemFree: 10 kB\nMemAvailable: 4194304 kB\n"


@pytest.fixture
def machine(tmp_path):
    def build(files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_host_facts(tmp_path)

    return build


def test_a_machine_without_limits(machine):
    facts = machine({"proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx2 avx512_bf16\n"})
    assert facts.mem_usable_bytes == 4 << 30
    assert facts.cgroup_free_bytes is None
    assert facts.cpu_quota is None
    assert facts.cpu_flags == {"fpu", "avx2", "avx512_bf16"}
    assert facts.gpus == ()


def test_kernels_of_our_own_need_a_compiler_or_files_that_are_compiled(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not machine({}).has_cpu_kernels

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "clang++").touch(mode=0o755)
    assert machine({}).has_cpu_kernels

    (tmp_path / "bin" / "clang++").unlink()
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    assert not machine({}).has_cpu_kernels
    (tmp_path / "cache" / "kernels" / "cpu-avx512-1.so").touch()
    assert machine({}).has_cpu_kernels


def test_cgroup_v2_limits_are_the_tightest_on_the_way_up(machine):
    facts = machine(
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "3000\n",
            "sys/fs/cgroup/outer/memory.current": "1500\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 500\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/cpu.max": "max 100000\n",
        }
    )
    assert facts.cgroup_free_bytes == 3000 - (1500 - 500)
    assert facts.mem_usable_bytes == 2000
    assert facts.cpu_quota == 1.5


def test_cgroup_v1_inside_a_container_whose_path_is_the_hosts(machine):
    facts = machine(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    assert facts.cgroup_free_bytes == 600000
    assert facts.cpu_quota == 2.0


def test_cgroup_v1_writes_no_limit_as_a_huge_number(machine):
    facts = machine(
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        }
    )
    assert facts.cgroup_free_bytes is None
    assert facts.cpu_quota is None


def test_hyperthreads_of_one_core_count_once(machine):
    cpus = sorted(os.sched_getaffinity(0))
    facts = machine(
        {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-127" for cpu in cpus},
    )
    assert facts.num_cpus == len(cpus)
    assert facts.num_cores == 1
    assert usable_threads(facts) == 1
