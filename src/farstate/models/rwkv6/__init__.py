"""RWKV-6: `shape` (no torch), `block`."""
