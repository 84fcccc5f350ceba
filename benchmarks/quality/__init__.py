"""How close are answers from reused KV to full prefill's? `python -m benchmarks.quality run|report`."""
