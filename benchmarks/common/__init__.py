"""What several benchmarks share: the facts of a run, tables of text, prompts over the demo's passages."""
