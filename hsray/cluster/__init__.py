"""Everything Ray. The only package that imports ray, and only once it is used."""

from hsray.cluster.ray_cluster import ClusterEvent, RayCluster, RunFailed, Totals

__all__ = ["ClusterEvent", "RayCluster", "RunFailed", "Totals"]
