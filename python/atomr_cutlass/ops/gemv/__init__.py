"""Matrix times vector."""
