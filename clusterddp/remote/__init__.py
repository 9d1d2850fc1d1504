"""Commands on a cluster from another machine, by ssh: `clusterddp --on NAME …`."""
