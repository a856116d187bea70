"""Serving without devices: executors in virtual time."""

from longctx.simulation.executor import VirtualExecutor as VirtualExecutor
