"""What a simulated or served workload came to: tables, drawings, files of other tools' forms."""
