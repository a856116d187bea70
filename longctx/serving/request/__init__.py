"""What users ask for and get: requests, outputs, completions and their text."""
