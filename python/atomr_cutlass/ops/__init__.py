"""The operations, a folder for each."""
