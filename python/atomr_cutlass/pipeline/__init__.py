"""From a problem to a launch: the choice of a kernel, its plan, the caches, and the reports on them."""
