"""Reports of simulated and served workloads: tables, drawings, and files for other tools."""
