"""Engines behind one address, for real: four servers on this machine, a router, and clients."""
