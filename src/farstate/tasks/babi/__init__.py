"""bAbI, tasks qa1 – qa10: a reader of its files, a solver, and a simulator of the same worlds."""
