"""Gated DeltaNet: `shape` (no torch), `block`."""
