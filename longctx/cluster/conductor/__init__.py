"""The conductor: which instances serve a request, and whether any does. Plain data in, decisions out.

No socket, no clock, no JAX: the router of real servers and the simulator call the same methods.
"""
