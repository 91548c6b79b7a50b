from __future__ import annotations

import os
import sys

import pytest

from engine.runtime.errors import ConfigError
from engine.supervisor.ray.cluster import ray_cluster
from tests.supervisor.fake_ray import HERE, FakeRay


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As it was, afterwards: a Ray of our own changes it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_the_cluster_that_is_there_is_joined_and_left(ray):
    ray.clusters["auto"] = None

    with ray_cluster("unused") as cluster:
        assert (cluster.is_own, cluster.address) == (False, HERE)
        assert (
            cluster.describe() == "10.0.0.1 (CPU 4 GPU 1), 10.0.0.2 (CPU 8 GPU 0); free in all: CPU 2.5 GPU 1"
        )

    assert ray.events == ["init auto", "shutdown"]
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize(("address", "inits"), [("", ["init auto", "init local"]), ("local", ["init local"])])
def test_where_there_is_none_one_is_started_that_calls_nobody_and_keeps_its_files_together(
    ray, monkeypatch, address, inits, caplog
):
    monkeypatch.setenv("RAY_ADDRESS", address)

    with caplog.at_level("INFO"), ray_cluster("a folder") as cluster:
        assert cluster.is_own
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        assert os.environ["TMPDIR"] == "a folder"
        token = os.environ["RAY_AUTH_TOKEN"]

    assert ray.events == [*inits, "shutdown"]
    assert "starting Ray on this machine" in caplog.text
    assert len(token) == 64 and token not in caplog.text


def test_a_cluster_that_is_named_and_does_not_answer_is_an_error_and_not_replaced(ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")

    with pytest.raises(ConfigError, match=r"at RAY_ADDRESS=10\.9\.9\.9:6379: Could not find any running Ray"):
        ray_cluster("unused").__enter__()

    assert ray.events == ["init auto", "shutdown"]


def test_another_version_is_the_users_to_mend(ray):
    ray.clusters["auto"] = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1")

    with pytest.raises(
        ConfigError, match="this machine belongs to: Version mismatch: The cluster was started with:$"
    ):
        ray_cluster("unused").__enter__()


def test_a_client_of_a_distant_cluster_has_no_place_for_rank_0(ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.9:10001")

    with pytest.raises(ConfigError, match=r"`ray start --address=HOST:PORT` here, and unset"):
        ray_cluster("unused").__enter__()


def test_without_the_package_the_message_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"pip install ray, or use --executor local"):
        ray_cluster("unused").__enter__()
