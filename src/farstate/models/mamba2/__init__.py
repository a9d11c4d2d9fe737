"""Mamba-2: `shape` (no torch), `block`."""
