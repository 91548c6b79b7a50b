"""`simulate`: runs one workload on one cluster."""

from __future__ import annotations

from collections.abc import Mapping

from .cluster import Cluster, ClusterSettings
from .cost_model import CostModel
from .measurements import Measurements
from .report import Report, make_report
from .sim_request import Workload
from .simulated_engine import ReplicaSettings


def simulate(
    workload: Workload,
    replica: ReplicaSettings,
    cost: CostModel,
    cluster: ClusterSettings | None = None,
    *,
    slo_ms: Mapping[str, float] | None = None,
    name: str = "",
) -> Report:
    """Run a workload to its end and report; equal arguments give equal reports.

    Raises:
        ConfigError: the cluster's settings contradict each other, or the workload's file is broken.
        SimulationError: the scheduler makes no progress; a bug.
    """
    cluster = cluster or ClusterSettings()
    measurements = Measurements()
    Cluster(cluster, replica, cost, measurements).run(workload)
    return make_report(
        measurements,
        name=name or replica.scheduler.schedule_policy,
        num_replicas=cluster.num_replicas,
        slo_ms=slo_ms,
    )
