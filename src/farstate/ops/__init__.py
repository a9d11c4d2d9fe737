"""The recurrences and their neighbours as functions of tensors; each has a `naive` definition beside the fast version."""
