"""Plans for a model on so many devices: which meet a target, what they cost, and why others do not. It loads no JAX."""
