"""Launchers that start the instances of a cluster and start them again: this machine, a Ray cluster, or none."""
