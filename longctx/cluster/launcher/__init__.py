"""Who starts the instances of a cluster, and starts them again: this machine, a Ray cluster, or nobody here."""
