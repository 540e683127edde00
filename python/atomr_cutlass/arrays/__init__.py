"""Arrays of any framework: what they are, how kernels receive them, how results are made."""
