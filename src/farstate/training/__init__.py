"""Pre- and post-training: recipe, initial states, the trainer and what it writes."""
