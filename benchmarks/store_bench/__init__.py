"""The parts of `benchmarks.store`: each measures one thing and returns rows."""
