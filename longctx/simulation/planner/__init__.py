"""Search of parallel plans for a model: those that meet a target, their cost, and the limit that others miss."""
