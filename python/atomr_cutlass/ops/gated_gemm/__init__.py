"""The two products of a gated linear unit in one kernel."""
