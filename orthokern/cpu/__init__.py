"""The CPU leaf of the modal ops: one module for an op."""
