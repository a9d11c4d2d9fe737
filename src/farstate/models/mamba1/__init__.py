"""Mamba-1: `shape` (no torch), `block`."""
