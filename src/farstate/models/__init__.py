"""Blocks, language models and their checkpoints. Importing this package loads no torch; its modules do."""
