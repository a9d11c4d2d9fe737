"""What each job of a plan costs before it runs: parameters, tokens, operations, memory of a device, hours. Loads no torch.

`devices` are what jobs run on; `work` counts operations, `activations` what a training step keeps; `jobs` puts them together for a
stage; `resources` turns that into what a cluster is asked for, `refusal` into a line where jobs cannot run, and `show` into what
`farstate plan` prints. The formulas, and how they were measured, stand in docs/cluster.md.
"""
