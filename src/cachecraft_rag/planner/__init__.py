"""What to reuse and what to recompute: pure arithmetic over stored chunks' metadata.

`build.build_plan` makes a `plan.ReusePlan` from a `plan.PlanRequest`. Nothing is re-exported here, so
that the names of the strategies can be read (`strategies.STRATEGIES`) without loading numpy.
"""
