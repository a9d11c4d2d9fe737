"""Gated linear attention: `shape` (no torch), `block`."""
